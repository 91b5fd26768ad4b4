"""What the batching core needs from a model: tokens for the rows of a step. Implemented on transformers and as a fake.

All methods are called in the engine's thread, except the properties, which are fixed once `open` has returned.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rayrl.inference.engine import WeightSpec
from rayrl.inference.request_check import ModelLimits
from rayrl.inference.scheduler import PromptGroup
from rayrl.inference.scheduler import Sequence as RunningSequence

if TYPE_CHECKING:
    from torch import Tensor


class TokenModel(Protocol):
    """A model with one cache row per running sequence."""

    @property
    def limits(self) -> ModelLimits:
        """What requests may ask for."""
        ...

    def open(self) -> None:
        """Load the model and warm it up."""
        ...

    def ends(self, sequence: RunningSequence) -> bool:
        """Return whether the newest token of a sequence is one with which this model ends."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`; only called where the limits say that it can be."""
        ...

    def step(self, rows: list[RunningSequence], groups: list[PromptGroup]) -> tuple[list[int], list[float]]:
        """Sample one token for each row and return tokens and logprobs.

        The last rows, as many as the groups have members, are new: their prompts are not in the cache yet. A
        logprob that is not finite says that the model gave no distribution for that row.
        """
        ...

    def move_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy what the cache holds of a row, `num_tokens` positions, over another row."""
        ...

    def clear_row(self, row: int) -> None:
        """Forget what the cache holds of a row, so that nothing of it can reach a later sequence."""
        ...

    def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        """EngineError with the first difference if `load` would not take these."""
        ...

    def load(self, tensors: "Mapping[str, Tensor]", *, may_keep: bool = False) -> bool:
        """Replace all weights. EngineError, and no change, if they do not fit.

        `may_keep`: the tensors stay as they are until the next load. Returns whether they are in use themselves.
        """
        ...

    def checksums(self, specs: Sequence[WeightSpec]) -> Mapping[str, str]:
        """Return the checksums of those of the weights that the model has."""
        ...
