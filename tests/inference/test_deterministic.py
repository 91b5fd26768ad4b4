"""The embedded engine in deterministic mode: the same bits for a request, whatever runs beside it."""

import asyncio

import pytest

from rayrl.config.inference import InferenceConfig, TransformersEngine
from rayrl.config.model import ModelConfig
from rayrl.inference.embedded import embedded_engine, load_model
from rayrl.models.loading import load_causal_lm
from rayrl.types.sampling import Completion, GenerationRequest, SamplingParams, join_chunks

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPTS = [(2, 3, 4), (5, 6, 7, 8, 9, 10, 11), (12,), (2, 3, 4, 5, 6)]


async def completions(folder, order, *, max_batch_size, deterministic) -> dict[str, Completion]:
    """Ask for two samples of each prompt in `order`, all at once, and return them by request id."""
    config = InferenceConfig(engine=TransformersEngine(type="transformers", max_batch_size=max_batch_size))
    engine = embedded_engine(
        lambda: load_model(ModelConfig(path=str(folder))), config, seed=0, deterministic=deterministic
    )
    await engine.start()
    await engine.load(0, dict(load_causal_lm(folder).named_parameters()))
    requests = [
        GenerationRequest(
            request_id=f"{index}-{sample}",
            prompt_tokens=PROMPTS[index],
            params=SamplingParams(max_new_tokens=12, stop_token_ids=(), min_new_tokens=0, seed=10 * index + sample),
        )
        for index in order
        for sample in range(2)
    ]

    async def complete(request: GenerationRequest) -> Completion:
        return join_chunks([chunk async for chunk in engine.generate(request)])

    try:
        found = await asyncio.gather(*(complete(request) for request in requests))
    finally:
        await engine.close()
    return {request.request_id: item for request, item in zip(requests, found, strict=True)}


async def test_request_gets_the_same_bits_whatever_runs_beside_it(tiny_model) -> None:
    together = await completions(tiny_model, [0, 1, 2, 3], max_batch_size=8, deterministic=True)
    squeezed = await completions(tiny_model, [3, 1, 0, 2], max_batch_size=3, deterministic=True)
    for index in range(len(PROMPTS)):
        alone = await completions(tiny_model, [index], max_batch_size=8, deterministic=True)
        for request_id, expected in alone.items():
            for found in (together[request_id], squeezed[request_id]):
                assert found.tokens == expected.tokens
                assert found.logprobs == expected.logprobs, "bit by bit"


async def test_deterministic_mode_samples_what_the_batched_engine_does(tiny_model) -> None:
    batched = await completions(tiny_model, [0, 1, 2, 3], max_batch_size=8, deterministic=False)
    alone = await completions(tiny_model, [0, 1, 2, 3], max_batch_size=8, deterministic=True)
    for request_id, expected in batched.items():
        assert alone[request_id].tokens == expected.tokens
        assert alone[request_id].logprobs == pytest.approx(expected.logprobs, rel=1e-4, abs=1e-5)
