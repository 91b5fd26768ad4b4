"""Publications of adapters alone: an engine's side, which makes whole weights of them.

    model folder ──> base, kept ──┐
    trainer ──A, B──> received ───┴─> W + (alpha / r) B A, staged in the engine's memory ─commit─> in use

The engine itself is given whole weights and knows nothing of adapters. Every version is made from the base, never from
the version before: it depends on what arrived for it alone, and a new engine needs nothing but its model folder. All of
this is done beside the weights in use, while generation goes on.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rayrl.config.model import ModelConfig
from rayrl.config.training import LoraConfig
from rayrl.errors import EngineError
from rayrl.inference.engine import WeightSpec
from rayrl.inference.weights import named_weights
from rayrl.infra.buckets import TensorSpec, stream_offsets
from rayrl.infra.weight_manifest import checksum_of
from rayrl.models.adapters import adapter_names, merged_weight
from rayrl.utils.nearest import did_you_mean

if TYPE_CHECKING:
    from rayrl.infra.weight_manifest import WeightManifest


class AdapterMerge:
    """Makes whole weights of the adapters of a version. All methods but the properties may take long."""

    def __init__(self, name: str, model: ModelConfig, lora: LoraConfig) -> None:
        self._name = name
        self._model = model
        self._lora = lora
        self._dtype: torch.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
        self._base: dict[str, Tensor] = {}
        self._adapted: frozenset[str] = frozenset()
        self._filled: set[tuple[int, int]] = set()
        """Address and size of memory that holds the weights without adapter already."""
        self._staged: Mapping[str, Tensor] = {}
        self._in_use: Mapping[str, Tensor] = {}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What `merge` gives, in its order; after `open`."""
        name = str(self._dtype).removeprefix("torch.")
        return tuple(TensorSpec(name=key, shape=tuple(item.shape), dtype=name) for key, item in self._base.items())

    @property
    def num_bytes(self) -> int:
        """Memory that `merge` fills."""
        return stream_offsets(self.specs)[1]

    def open(self) -> None:
        """Read the base, in float32 as the trainer does. ModelError if that cannot be done."""
        from rayrl.models.loading import load_causal_lm

        if not self._base:
            lm = load_causal_lm(self._model.path, trust_remote_code=self._model.trust_remote_code)
            self._base = {name: weight.detach() for name, weight in named_weights(lm).items()}

    def check(self, specs: Sequence[WeightSpec]) -> None:
        """EngineError with the first thing that is wrong with the adapters to come."""
        given = {name: (tuple(shape), dtype) for name, shape, dtype in specs}
        adapted = [name for name in self._base if adapter_names(name)[0] in given]
        expected: dict[str, tuple[tuple[int, ...], str]] = {}
        for name in adapted:
            num_out, num_in = self._base[name].shape
            down, up = adapter_names(name)
            expected |= {down: ((self._lora.r, num_in), "float32"), up: ((num_out, self._lora.r), "float32")}
        for name, found in given.items():
            if name not in expected:
                raise EngineError(
                    f"engine {self._name} takes adapters (transfer.lora=adapters); {name!r} is none of a weight that "
                    f"its model has{did_you_mean(name, expected)}"
                )
            if found != expected[name]:
                raise EngineError(f"adapter {name!r} is {found}; for the model of {self._name} it is {expected[name]}")
        missing = next((name for name in expected if name not in given), None)
        if missing is not None:
            raise EngineError(f"engine {self._name}: {missing!r} does not come, but the other half of the adapter does")
        self._adapted = frozenset(adapted)

    def merge(self, adapters: Mapping[str, Tensor], memory: Tensor | None) -> dict[str, Tensor]:
        """Return all weights, as views of `memory` if it is given, by the adapters that were checked."""
        specs = self.specs
        offsets, num_bytes = stream_offsets(specs)
        stream = memory if memory is not None else torch.empty(num_bytes, dtype=torch.uint8)
        key = (stream.data_ptr(), stream.numel())
        scaling = self._lora.alpha / self._lora.r
        merged: dict[str, Tensor] = {}
        for spec, offset in zip(specs, offsets, strict=True):
            flat = stream[offset : offset + spec.num_bytes]
            target = merged[spec.name] = flat.view(self._dtype).view(spec.shape)
            if spec.name in self._adapted:
                down, up = (adapters[name] for name in adapter_names(spec.name))
                target.copy_(merged_weight(self._base[spec.name], down, up, scaling))
            elif memory is None or key not in self._filled:
                target.copy_(self._base[spec.name])
        if memory is not None:
            self._filled.add(key)
        # Of their own: what arrived may be memory that others wait for.
        self._staged = {name: tensor.clone() for name, tensor in adapters.items()}
        return merged

    def committed(self) -> None:
        """What was merged last is in use."""
        self._in_use = self._staged

    def untouched(self) -> tuple[WeightSpec, ...]:
        """Return the weights that have no adapter."""
        return tuple((spec.name, spec.shape, spec.dtype) for spec in self.specs if spec.name not in self._adapted)

    def checksums(self, manifest: "WeightManifest") -> dict[str, str]:
        """Return the checksums of the adapters in use; merged weights are sums, which machines may round otherwise."""
        wanted = {spec.name for spec in manifest.tensors}
        return {name: checksum_of(tensor) for name, tensor in self._in_use.items() if name in wanted}
