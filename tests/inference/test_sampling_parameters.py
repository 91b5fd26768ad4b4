"""Every sampling parameter reaches the real engines: each changes what comes back, and none is dropped."""

from dataclasses import fields

import pytest

from rayrl.inference.engine import RequestRefused
from rayrl.types.sampling import GuidedDecoding, SamplingParams

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
    assert greedy.tokens != (await _tokens(engine, temperature=2.0, min_new_tokens=12)).tokens
    if engine.kind == "vllm":
        for value in (0.001, 2.5):
            with pytest.raises(RequestRefused, match=f"temperature={value} is not applied"):
                await _tokens(engine, temperature=value)


async def _top_p(engine):
    only_best = await _tokens(engine, top_p=1e-6)
    assert only_best.tokens == (await _tokens(engine, temperature=0)).tokens
    assert only_best.logprobs == pytest.approx([0.0] * len(only_best.logprobs), rel=0, abs=1e-6)


async def _top_k(engine):
    only_best = await _tokens(engine, top_k=1, temperature=2.0)
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


async def _penalties_refused(engine, **params):
    with pytest.raises(RequestRefused, match="penalties are not applied by this engine"):
        await _tokens(engine, **params)


async def _presence_penalty(engine):
    if engine.kind != "vllm":
        return await _penalties_refused(engine, presence_penalty=0.5)
    # More than the logits differ by: no token comes twice.
    await engine.engine.load(1, {name: 0.02 * item for name, item in engine.weights.items()})
    free = await _tokens(engine, temperature=0, min_new_tokens=12)
    other = await _tokens(engine, temperature=0, min_new_tokens=12, presence_penalty=2.0)
    assert len(set(free.tokens)) < 12 and len(set(other.tokens)) == 12


async def _frequency_penalty(engine):
    if engine.kind != "vllm":
        return await _penalties_refused(engine, frequency_penalty=0.5)
    await engine.engine.load(1, {name: 0.02 * item for name, item in engine.weights.items()})
    other = await _tokens(engine, temperature=0, min_new_tokens=12, frequency_penalty=2.0)
    assert len(set(other.tokens)) == 12


async def _repetition_penalty(engine):
    if engine.kind != "vllm":
        return await _penalties_refused(engine, repetition_penalty=1.5)
    free = await _tokens(engine, temperature=0, min_new_tokens=12)
    other = await _tokens(engine, temperature=0, min_new_tokens=12, repetition_penalty=50.0)
    assert len(set(free.tokens)) < len(set(other.tokens))


async def _guided(engine):
    guides = {"regex": "12?3", "choice": ("321",), "grammar": 'root ::= "123"', "json_schema": '{"enum": [123]}'}
    if engine.kind != "vllm":
        with pytest.raises(RequestRefused, match="guided decoding is not done by this engine"):
            await _tokens(engine, guided=GuidedDecoding(regex="12?3"))
        return
    for name, value in guides.items():
        completion = await _tokens(engine, guided=GuidedDecoding(**{name: value}))
        text = engine.text(completion.tokens)
        assert (text in ("123", "13", "321"), completion.finish_reason) == (True, "stop"), (name, text)


CHECKS = {
    "max_new_tokens": _max_new_tokens,
    "temperature": _temperature,
    "top_p": _top_p,
    "top_k": _top_k,
    "min_new_tokens": _min_new_tokens,
    "stop_token_ids": _stop_token_ids,
    "stop": _stop,
    "seed": _seed,
    "presence_penalty": _presence_penalty,
    "frequency_penalty": _frequency_penalty,
    "repetition_penalty": _repetition_penalty,
    "guided": _guided,
}


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
async def test_sampling_parameter_changes_what_comes_back(kind, make_engine, name):
    engine = await make_engine(kind)

    assert name in CHECKS, f"SamplingParams.{name} is new: show here that the engine obeys it"
    await CHECKS[name](engine)
