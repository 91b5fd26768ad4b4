"""Pairs of a better and a worse answer as trajectories: for preference training, and for reward models.

A pair is two trajectories of one prompt, the better one first. For a reward model the loss stands on one token after
the text: what a scalar head gives for the token before it, the last one of the text, is the score.
"""

from dataclasses import dataclass, replace
from typing import Literal

from rayrl.errors import DatasetError
from rayrl.rollout.sft_examples import TEACHER_VERSION, encode_example
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import Tokenizer
from rayrl.types.trajectory import Trajectory, VersionSpan
from rayrl.utils.nearest import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEncoding:
    """How pairs are turned into tokens.

    Example: `PairEncoding(prompt_format="text", system_prompt=None, rejected_field="rejected", loss_on="answer")`.
    """

    prompt_format: str
    system_prompt: str | None
    rejected_field: str
    """Metadata field of the prompt with the worse answer."""
    loss_on: Literal["answer", "end"]
    """All tokens of the answer, or one token after its end."""


def encode_pair(
    prompt: Prompt, tokenizer: Tokenizer, encoding: PairEncoding, max_context: int
) -> tuple[Trajectory, Trajectory]:
    """Return the better and the worse answer to `prompt`. DatasetError without either, PromptTooLong beyond context."""
    rejected = prompt.metadata.get(encoding.rejected_field)
    if not isinstance(rejected, str):
        raise DatasetError(
            f"prompt {prompt.id} has no text in field {encoding.rejected_field!r}"
            f"{did_you_mean(encoding.rejected_field, prompt.metadata)}; it has {sorted(prompt.metadata)}. Set "
            "rejected_field to the field with the worse answer (for dataset.type=arithmetic: dataset.with_rejected)"
        )
    examples = [
        encode_example(
            replace(prompt, answer=answer),
            tokenizer,
            prompt_format=encoding.prompt_format,
            system_prompt=encoding.system_prompt,
            max_context=max_context,
        )
        for answer in (prompt.answer, rejected)
    ]
    if encoding.loss_on == "end":
        examples = [loss_on_end(example) for example in examples]
    return examples[0], replace(examples[1], sample_index=1)


def loss_on_end(example: Trajectory) -> Trajectory:
    """Return the example with one more token, which alone carries loss; it is never read, so any token does."""
    length = len(example.tokens)
    return replace(
        example,
        tokens=(*example.tokens, example.tokens[-1]),
        loss_mask=(0,) * length + (1,),
        logprobs=(0.0,) * (length + 1),
        spans=(VersionSpan(start=length, end=length + 1, version=TEACHER_VERSION),),
    )
