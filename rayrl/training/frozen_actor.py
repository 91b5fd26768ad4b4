"""An actor that hosts a frozen model: scores of texts by a reward model, logprobs of sampled tokens by a teacher.

A thin shell over a training engine of one rank that never makes a step. It keeps no state: after its process dies, Ray
starts it again and repeats the calls that were running.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayrl.config.frozen import FrozenModelSection
from rayrl.config.model import ModelConfig
from rayrl.config.training import FsdpEngine, OptimizerConfig, TrainingConfig
from rayrl.errors import ModelError
from rayrl.training.scalar_head import HeadKind
from rayrl.utils.batched_calls import BatchedCalls
from rayrl.utils.logger import get_logger, setup_logging

if TYPE_CHECKING:
    import pyarrow as pa

TEACHER_COLUMN = "teacher_logprobs"
"""Column that `annotate` adds to a record batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenModelSettings:
    """What the actor is told when it is spawned."""

    name: str
    """Name of the role, for logs."""
    model: FrozenModelSection
    """The model; its path must be absolute, since actors have another working directory."""
    head: HeadKind
    """`scalar` for a reward model, `policy` for a teacher."""
    temperature: float = 1.0
    """Logits are divided by it."""
    max_batch_size: int = 64
    """Most texts of one batch."""


class FrozenModelActor:
    """One frozen model."""

    def __init__(self, settings: FrozenModelSettings) -> None:
        import torch

        setup_logging()
        torch.set_num_threads(settings.model.threads)
        if settings.head == "scalar":
            _check_scores(settings.model.path)
        self._engine = _make_engine(settings)
        self._log = get_logger(settings.name)
        self._calls = BatchedCalls[Sequence[int], float](self._score_batch, settings.max_batch_size)
        # One forward pass at a time: the engine is no place for two threads.
        self._turn = asyncio.Lock()
        self._num_texts = 0

    async def ready(self) -> dict[str, Any]:
        """Return node, host and process id."""
        from rayrl.infra.process_info import process_info

        return process_info()

    async def score(self, tokens: Sequence[int]) -> float:
        """Return the score of one text, in a batch with others that wait."""
        return await self._calls.call(tokens)

    async def annotate(self, *batches: "pa.RecordBatch") -> list[Any]:
        """Return the number of scored tokens, then each batch with the teacher's logprobs of its loss-carrying tokens.

        Called with one return more than batches, so that only the number moves.
        """
        async with self._turn:
            annotated = await asyncio.to_thread(self._annotate, batches)
        return [sum(batch["loss_mask"].flatten().to_numpy().sum() for batch in batches), *annotated]

    async def status(self) -> dict[str, Any]:
        """Return counts."""
        return {"texts": self._num_texts}

    async def close(self) -> None:
        """Nothing is owned but memory."""

    async def _score_batch(self, texts: Sequence[Sequence[int]]) -> Sequence[float]:
        self._num_texts += len(texts)
        async with self._turn:
            return await asyncio.to_thread(self._scores, texts)

    def _scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        from rayrl.training.batch import TrainBatch

        lengths = [len(text) + 1 for text in texts]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        total = int(offsets[-1])
        mask = np.zeros(total, dtype=np.uint8)
        # The token after a text carries the loss: what the head gives before it, at the end of the text, is the score.
        mask[offsets[1:] - 1] = 1
        batch = TrainBatch(
            tokens=np.concatenate([np.asarray([*text, text[-1]], dtype=np.int32) for text in texts]),
            loss_mask=mask,
            logprobs=np.zeros(total, dtype=np.float32),
            versions=np.full(total, -1, dtype=np.int32),
            offsets=offsets,
            rewards=np.zeros(len(texts), dtype=np.float32),
            group_ids=np.arange(len(texts), dtype=np.int64),
        )
        scores: list[float] = self._engine.forward_values(batch)[mask != 0].tolist()
        return scores

    def _annotate(self, batches: "Sequence[pa.RecordBatch]") -> "list[pa.RecordBatch]":
        from rayrl.training.batch import batch_from_arrow

        return [_with_column(batch, self._engine.forward_logprobs(batch_from_arrow([batch])[0])) for batch in batches]


def _with_column(batch: "pa.RecordBatch", values: Any) -> "pa.RecordBatch":
    """Return the batch with the values [sum T] of its usable rows as a column of lists, empty where a row failed."""
    import pyarrow as pa

    counts = [
        len(tokens) if failure is None else 0
        for tokens, failure in zip(batch["tokens"], batch["failure"].to_pylist(), strict=True)
    ]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, type=pa.float32()))
    return batch.append_column(pa.field(TEACHER_COLUMN, pa.list_(pa.float32())), column)


def _make_engine(settings: FrozenModelSettings) -> Any:
    import torch

    from rayrl.training.engine import TrainEngineSettings
    from rayrl.training.registry import make_train_engine

    model = settings.model
    return make_train_engine(
        TrainEngineSettings(
            model=ModelConfig(path=model.path, trust_remote_code=model.trust_remote_code),
            training=TrainingConfig(
                optimizer=OptimizerConfig(lr=1.0),  # never used: the engine makes no step, so it has no moments
                engine=FsdpEngine(type="fsdp", autocast=model.autocast),
                micro_batch_tokens=model.micro_batch_tokens,
            ),
            rank=0,
            world_size=1,
            temperature=settings.temperature,
            num_steps=1,
            device=torch.device("cuda", 0) if model.gpus > 0 else torch.device("cpu"),
            head=settings.head,
        )
    )


def _check_scores(path: str) -> None:
    """ModelError if the folder holds no trained head: a new one would score everything 0, in silence."""
    from rayrl.training.scalar_head import stored_head

    if stored_head(Path(path)) is None:
        raise ModelError(f"{path!r} has no scalar head; give the export of `rayrl reward-model` in reward.path")
