"""Supervised examples as trajectories: the answer carries the loss, and no version sampled it."""

from rayrl.errors import DatasetError
from rayrl.rollout.single_turn import check_fits, encode_prompt
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import Tokenizer
from rayrl.types.trajectory import Trajectory, VersionSpan

TEACHER_VERSION = 0
"""Version written on supervised tokens: the field is about sampling, so it only has to be the same everywhere."""


def encode_example(
    prompt: Prompt, tokenizer: Tokenizer, *, prompt_format: str, system_prompt: str | None, max_context: int
) -> Trajectory:
    """Return prompt and answer, closed by the end-of-sequence token, with the loss on the answer."""
    if prompt.answer is None:
        raise DatasetError(f"prompt {prompt.id} has no answer to learn from; set dataset.answer_field")
    prompt_tokens = encode_prompt(prompt, tokenizer, prompt_format, system_prompt)
    answer_tokens = [*tokenizer.encode(prompt.answer), tokenizer.eos_token_ids[0]]
    check_fits(prompt, len(prompt_tokens), len(answer_tokens), max_context)
    offset, num_learned = len(prompt_tokens), len(answer_tokens)
    return Trajectory(
        prompt_id=prompt.id,
        sample_index=0,
        tokens=(*prompt_tokens, *answer_tokens),
        loss_mask=(0,) * offset + (1,) * num_learned,
        logprobs=(0.0,) * (offset + num_learned),
        spans=(VersionSpan(start=offset, end=offset + num_learned, version=TEACHER_VERSION),),
        reward=0.0,
        stop_reason="stop",
    )
