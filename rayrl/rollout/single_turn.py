"""The single-turn workflow: one question, one answer, one reward."""

from rayrl.errors import DatasetError, WorkflowError
from rayrl.types.prompt import Message, Prompt
from rayrl.types.protocols import EpisodeContext, Tokenizer
from rayrl.types.sampling import Completion
from rayrl.types.trajectory import Trajectory, VersionSpan


class PromptTooLong(WorkflowError):
    """The prompt leaves no room for a completion in the context."""


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, prompt_format: str, system_prompt: str | None) -> list[int]:
    """Return the token ids that the model is given for `prompt`.

    `chat` renders the chat template with the opening of the assistant's turn; `text` takes the text as it stands.
    Raises DatasetError if that leaves no token.
    """
    if prompt_format == "text":
        tokens = tokenizer.encode(prompt.text)
    else:
        messages = list(prompt.messages or (Message(role="user", content=prompt.text),))
        if system_prompt is not None:
            messages.insert(0, Message(role="system", content=system_prompt))
        tokens = tokenizer.encode_chat(messages)
    if not tokens:
        raise DatasetError(
            f"prompt {prompt.id} has no tokens, its text is {prompt.text!r}; remove it from the dataset, or choose "
            "another dataset.prompt_field"
        )
    return tokens


def check_fits(prompt: Prompt, num_prompt_tokens: int, max_new_tokens: int, max_context: int) -> None:
    """Raise PromptTooLong where prompt and completion together do not fit the context."""
    if num_prompt_tokens + max_new_tokens > max_context:
        raise PromptTooLong(
            f"prompt {prompt.id} has {num_prompt_tokens} tokens and {max_new_tokens} new ones are asked for, but the "
            f"context holds {max_context}; lower sampling.max_new_tokens, raise model.max_context, or remove the prompt"
        )


class SingleTurn:
    """Asks once. Tokens go in and come out as ids: what was sampled is never encoded again."""

    def __init__(self, prompt_format: str = "chat", system_prompt: str | None = None) -> None:
        self._prompt_format = prompt_format
        self._system_prompt = system_prompt

    async def run_episode(self, prompt: Prompt, sample_index: int, context: EpisodeContext) -> Trajectory:
        """Return the trajectory `prompt tokens + completion tokens` with the reward of the decoded completion."""
        prompt_tokens = encode_prompt(prompt, context.tokenizer, self._prompt_format, self._system_prompt)
        check_fits(prompt, len(prompt_tokens), context.params.max_new_tokens, context.max_context)
        completion = await context.sampler.sample(prompt_tokens, context.params)
        result = await context.reward.score(prompt, context.tokenizer.decode(completion.tokens))
        return join_turn(prompt, sample_index, prompt_tokens, completion, result.total, dict(result.parts))


def join_turn(
    prompt: Prompt,
    sample_index: int,
    prompt_tokens: list[int],
    completion: Completion,
    reward: float,
    reward_parts: dict[str, float],
) -> Trajectory:
    """Return the trajectory of one question and its completion."""
    offset = len(prompt_tokens)
    num_sampled = len(completion.tokens)
    return Trajectory(
        prompt_id=prompt.id,
        sample_index=sample_index,
        tokens=(*prompt_tokens, *completion.tokens),
        loss_mask=(0,) * offset + (1,) * num_sampled,
        logprobs=(0.0,) * offset + completion.logprobs,
        spans=tuple(
            VersionSpan(start=span.start + offset, end=span.end + offset, version=span.version)
            for span in completion.spans
        ),
        reward=reward,
        reward_parts=reward_parts,
        stop_reason=completion.finish_reason,
    )
