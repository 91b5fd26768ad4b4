"""What an engine can serve: checked once, when a request arrives."""

from collections.abc import Iterable
from dataclasses import dataclass

from rayrl.inference.engine import RequestRefused
from rayrl.types.sampling import GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the model of an engine allows."""

    max_context: int
    """Prompt and completion together, in tokens."""
    vocab_size: int
    """Ids are 0 .. vocab_size - 1."""
    can_decode: bool
    """Whether there is a tokenizer for stop strings."""
    can_penalize: bool = False
    """Whether penalties are applied."""
    can_guide: bool = False
    """Whether completions can be held to a schema, an expression, a choice or a grammar."""
    temperatures: tuple[float, float] = (0.0, float("inf"))
    """Smallest and largest temperature above 0 that is applied as it was asked for."""


def check_request(request: GenerationRequest, limits: ModelLimits) -> None:
    """RequestRefused, with the numbers, if the engine cannot serve `request`."""
    fault = _prompt_fault(request.prompt_tokens, limits) or _params_fault(request.params, limits)
    if fault is not None:
        raise RequestRefused(f"request {request.request_id!r}: {fault}")


def _prompt_fault(prompt_tokens: tuple[int, ...], limits: ModelLimits) -> str | None:
    if not prompt_tokens:
        return "the prompt has no tokens"
    if len(prompt_tokens) >= limits.max_context:
        return (
            f"the prompt has {len(prompt_tokens)} tokens and leaves no room for a completion in the context of "
            f"{limits.max_context}; shorten it or raise model.max_context"
        )
    return _id_fault("prompt", prompt_tokens, limits)


def _params_fault(params: SamplingParams, limits: ModelLimits) -> str | None:
    if params.max_new_tokens < 1:
        return f"max_new_tokens={params.max_new_tokens} must be at least 1"
    if not 0 <= params.temperature < float("inf"):
        return f"temperature={params.temperature} must be finite and at least 0"
    low, high = limits.temperatures
    if params.temperature > 0 and not low <= params.temperature <= high:
        return f"temperature={params.temperature} is not applied by this engine; it takes 0 and {low:g} to {high:g}"
    if not 0 < params.top_p <= 1:
        return f"top_p={params.top_p} must be above 0 and at most 1"
    if params.top_k < 0:
        return f"top_k={params.top_k} must be at least 0 (0 keeps all)"
    if params.min_new_tokens < 0:
        return f"min_new_tokens={params.min_new_tokens} must be at least 0"
    if "" in params.stop:
        return "an empty string in stop would end every completion"
    if params.stop and not limits.can_decode:
        return f"stop={params.stop} needs a tokenizer, and this engine has none; use stop_token_ids"
    return _penalty_fault(params, limits) or _id_fault("stop_token_ids", params.stop_token_ids, limits)


def _penalty_fault(params: SamplingParams, limits: ModelLimits) -> str | None:
    for name, value in (("presence", params.presence_penalty), ("frequency", params.frequency_penalty)):
        if not -2 <= value <= 2:
            return f"{name}_penalty={value} must be between -2 and 2"
    if not 0 < params.repetition_penalty < float("inf"):
        return f"repetition_penalty={params.repetition_penalty} must be finite and above 0"
    if params.has_penalties and not limits.can_penalize:
        return "penalties are not applied by this engine; set them to 0, 0 and 1, or use inference.engine.type: vllm"
    if params.guided is not None and not limits.can_guide:
        return "guided decoding is not done by this engine; leave it out, or use inference.engine.type: vllm"
    return None


def _id_fault(name: str, ids: Iterable[int], limits: ModelLimits) -> str | None:
    wrong = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
    return None if wrong is None else f"{name} has id {wrong}; the model knows 0 to {limits.vocab_size - 1}"
