"""The contract of training engines, and what a step of one returns."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rayrl.config.model import ModelConfig
from rayrl.config.training import TrainingConfig
from rayrl.infra.buckets import TensorSpec
from rayrl.training.batch import FloatArray, TrainBatch
from rayrl.training.losses import LossFunction
from rayrl.training.scalar_head import HeadKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEngineSettings:
    """What one rank of a training engine is made from; the same on all ranks but for `rank`."""

    model: ModelConfig
    """The model; its path must be absolute where the working directory may differ."""
    training: TrainingConfig
    """Engine, layout, optimizer and schedule."""
    rank: int
    world_size: int
    """With more than one rank the default process group must exist and have this size."""
    temperature: float
    """Logits are divided by it."""
    num_steps: int
    """Optimizer steps of the whole run, for the schedule."""
    device: "torch.device"
    with_reference: bool = False
    """Make the reference policy too: the weights that training starts from."""
    head: HeadKind = "policy"
    """What the model gives for a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step; the same on every rank."""

    skipped: bool
    """True if loss or gradient were not finite, or no token carried loss: nothing was changed."""
    reason: str | None
    """Why it was skipped."""
    loss: float
    """Loss of the whole step."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    lr: float
    """Learning rate of the step."""
    sums: Mapping[str, float]
    """What the loss function logs, over all tokens of the step: sums, `num_tokens` is their number, and maxima."""
    num_processed_tokens: int
    """Tokens of all forward passes of the step, over all ranks, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A training engine at one moment."""

    optimizer_steps: int
    """Optimizer steps that changed the weights."""
    num_parameters: int
    """Parameters of the whole model, tied ones once."""
    world_size: int
    device: str


class TrainEngine(Protocol):
    """A model with its optimizer on a group of ranks. All methods are collective: every rank calls them alike.

    Made by `registry.make_train_engine`, which loads the model; ready when it is made. Every rank is given the whole
    batch and processes its share.
    """

    def train_step(self, batch: TrainBatch, loss_fn: LossFunction) -> StepResult:
        """Make one optimizer step. The update does not depend on ranks, micro-batches or shared prompts."""
        ...

    def forward_logprobs(self, batch: TrainBatch, *, reference: bool = False) -> FloatArray:
        """Return [sum T] logprobs of the loss-carrying tokens, 0 elsewhere, by the policy or the reference."""
        ...

    def gradients(self, batch: TrainBatch, loss_fn: LossFunction) -> "dict[str, Tensor]":
        """Return the whole gradient of a step by weight name, before clipping, without making the step."""
        ...

    def refresh_reference(self) -> None:
        """Make the policy as it is now the reference policy; part of what `save` writes from then on."""
        ...

    def forward_values(self, batch: TrainBatch) -> FloatArray:
        """Return [sum T] the scalar head's value at the token before each loss-carrying one, 0 elsewhere.

        Only of engines made with `head="scalar"`, which have no logprobs.
        """
        ...

    def weight_specs(self, dtype: str) -> tuple[TensorSpec, ...]:
        """Return names, shapes and data type of all weights in the order of `weight_tensors`, tied ones once."""
        ...

    def weight_tensors(self, dtype: str) -> "Iterator[tuple[str, Tensor]]":
        """Yield each weight as a whole, cast to `dtype`; it is gathered when it is asked for. May be the parameter
        itself: not to be changed, nor kept beyond the next step."""
        ...

    def adapter_specs(self) -> tuple[TensorSpec, ...]:
        """Return names, shapes and data type of `adapter_tensors`; none without `training.lora`."""
        ...

    def adapter_tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield A and B of each adapted weight as wholes, float32; gathered, and to be handled, as `weight_tensors`."""
        ...

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Copy what `save` writes, and return what writes the copy to `folder`.

        That may run in another thread while the engine trains on: it uses no group that training uses. An engine that
        cannot copy its state writes it here, and returns a function that does nothing.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights, moments, counts and random state into `folder`."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. CheckpointError if it is of another model or incomplete."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Write the float32 weights as a model folder of Hugging Face."""
        ...

    def status(self) -> EngineStatus:
        """Return counts."""
        ...
