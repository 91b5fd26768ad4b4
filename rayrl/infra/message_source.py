"""The bytes of messages, from tensors that are drawn one by one."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rayrl.infra.messages import Message
from rayrl.infra.phase_times import PhaseTimes
from rayrl.infra.weight_manifest import bytes_of


class MessageSource:
    """Gives the bytes of each message, on one device.

    What is one piece of a tensor there is a view of the tensor itself; all else is packed into buffers, in turn.
    """

    def __init__(self, tensors: Iterator[Tensor], *, device: torch.device, num_buffers: int, times: PhaseTimes) -> None:
        """`times` gets what drawing (`gather`) and packing (`pack`) take."""
        self._tensors = tensors
        self._device = device
        self._num_buffers = num_buffers
        self._times = times
        self._current, self._flat = -1, torch.empty(0, dtype=torch.uint8)
        self._buffers: list[Tensor] = []
        self._num_packed = 0

    def of(self, messages: Sequence[Message]) -> Iterator[Tensor]:
        """Yield the bytes of each message. Message i must be done with before `i + num_buffers` is asked for.

        A tensor is asked for only when its bytes are due, and once all are, before the last message, whatever else
        the iterator has to say.
        """
        longest = max((message.num_bytes for message in messages), default=0)
        for index, message in enumerate(messages):
            packed = self._direct(message)
            if packed is None:
                packed = self._pack(message, longest)
            if index == len(messages) - 1:
                self._drain()
            yield packed
        if not messages:
            self._drain()

    def _direct(self, message: Message) -> Tensor | None:
        if not message.is_direct:
            return None
        (piece,) = message.slices
        flat = self._tensor(piece.tensor_index)
        if flat.device.type != self._device.type:
            return None
        return flat[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]

    def _pack(self, message: Message, longest: int) -> Tensor:
        if len(self._buffers) < self._num_buffers:
            self._buffers.append(torch.empty(longest, dtype=torch.uint8, device=self._device))
        packed = self._buffers[self._num_packed % self._num_buffers][: message.num_bytes]
        self._num_packed += 1
        end = 0
        for piece in message.slices:
            flat = self._tensor(piece.tensor_index)
            with self._times.of("pack"):
                packed[end : piece.bucket_offset].zero_()
                end = piece.bucket_offset + piece.num_bytes
                part = flat[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
                packed[piece.bucket_offset : end].copy_(part)
        packed[end:].zero_()
        return packed

    def _tensor(self, index: int) -> Tensor:
        """Return the bytes of a tensor, the last that was drawn or a later one."""
        with self._times.of("gather"):
            while self._current < index:
                self._current, self._flat = self._current + 1, bytes_of(next(self._tensors))
        return self._flat

    def _drain(self) -> None:
        for _ in self._tensors:
            pass
