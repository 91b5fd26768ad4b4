"""A fake engine without a model: it answers from a script and obeys the same contract as the real ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rayrl.config.inference import InferenceConfig, ScriptedEngine
from rayrl.inference.engine import WeightSpec
from rayrl.inference.request_check import ModelLimits
from rayrl.inference.scheduler import PromptGroup
from rayrl.inference.scheduler import Sequence as RunningSequence
from rayrl.inference.step_gate import StepGate
from rayrl.inference.threaded import ThreadedEngine

if TYPE_CHECKING:
    from torch import Tensor

Reply = Callable[[tuple[int, ...]], Sequence[int]]
"""Prompt tokens to completion tokens, at least one; where `min_new_tokens` asks for more the last is repeated."""

SCRIPTED_LOGPROB = -0.5
"""Logprob of every scripted token."""
_MAX_BATCH_SIZE = 64


class ScriptedModel:
    """Implements `TokenModel` from a script; a reply ends with its last token."""

    def __init__(
        self,
        reply: Reply,
        *,
        max_context: int = 1 << 20,
        vocab_size: int = 1 << 20,
        eos_token_ids: tuple[int, ...] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._reply = reply
        self._decode = decode
        self._eos_token_ids = eos_token_ids
        self._limits = ModelLimits(max_context=max_context, vocab_size=vocab_size, can_decode=decode is not None)
        self._failure: Exception | None = None

    @property
    def limits(self) -> ModelLimits:
        """As given."""
        return self._limits

    def open(self) -> None:
        """Nothing to load."""

    def ends(self, sequence: RunningSequence) -> bool:
        """Return whether the script is over, or has one of the end tokens here."""
        is_over = len(sequence.tokens) >= len(self._reply(sequence.request.prompt_tokens))
        return is_over or sequence.tokens[-1] in self._eos_token_ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`."""
        assert self._decode is not None, "checked when the request arrived"
        return self._decode(tokens)

    def fail_next_step(self, error: Exception) -> None:
        """Raise `error` in the engine's thread at the next step."""
        self._failure = error

    def step(self, rows: list[RunningSequence], groups: list[PromptGroup]) -> tuple[list[int], list[float]]:
        """Return the next scripted token of each row."""
        if self._failure is not None:
            raise self._failure
        return [self._next_token(row) for row in rows], [SCRIPTED_LOGPROB] * len(rows)

    def move_row(self, source: int, target: int, num_tokens: int) -> None:
        """No cache to move."""

    def clear_row(self, row: int) -> None:
        """No cache to clear."""

    def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        """Any weights will do."""

    def load(self, tensors: "Mapping[str, Tensor]", *, may_keep: bool = False) -> bool:
        """Every set of weights gives the same script."""
        return False

    def checksums(self, specs: Sequence[WeightSpec]) -> Mapping[str, str]:
        """There are no weights."""
        return {}

    def _next_token(self, row: RunningSequence) -> int:
        reply = self._reply(row.request.prompt_tokens)
        return reply[min(len(row.tokens), len(reply) - 1)]


def make_scripted_engine(config: InferenceConfig, *, name: str, seed: int) -> ThreadedEngine:
    """Return the engine of a config with `engine.type: scripted`."""
    engine = config.engine
    assert isinstance(engine, ScriptedEngine), f"engine type is {engine.type}"
    model = ScriptedModel(lambda prompt_tokens: engine.reply_tokens)
    return scripted_engine(model, config, name=name, seed=seed)


def scripted_engine(
    model: ScriptedModel,
    config: InferenceConfig,
    *,
    name: str = "scripted",
    seed: int = 0,
    gate: StepGate | None = None,
    max_batch_size: int = _MAX_BATCH_SIZE,
) -> ThreadedEngine:
    """Return an engine that runs `model`; with a gate it takes only the steps that the gate allows."""
    return ThreadedEngine(
        model,
        config,
        max_batch_size=max_batch_size,
        prefill_tokens=model.limits.max_context,
        name=name,
        seed=seed,
        gate=gate,
    )
