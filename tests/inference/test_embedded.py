"""The embedded engine against transformers itself: same tokens, same probabilities, whatever else runs."""

import asyncio

import pytest
import torch

from rayrl.errors import EngineError, ModelError
from rayrl.inference.embedded import EmbeddedModel, LoadedModel, load_model
from rayrl.types.sampling import join_chunks

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPTS = [(2, 3, 4), (5, 6, 7, 8, 9, 10, 11), (12,), (2, 3, 4, 5, 6)]


def reference_tokens(model, prompt, num_tokens):
    """Greedy tokens of transformers' own generate, without an end."""
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
    )
    return tuple(output[0, len(prompt) :].tolist())


def reference_logprobs(model, prompt, tokens, temperature=1.0, keep=None):
    """Log-probabilities of `tokens` from one forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double() / temperature
    if keep is not None:
        logits = torch.stack([row.masked_fill(~keep(row), -torch.inf) for row in logits])
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


def top_k(k):
    return lambda row: row >= row.sort(descending=True).values[k - 1]


def top_p(p):
    def keep(row):
        probs, order = row.softmax(-1).sort(descending=True)
        count = int((probs.cumsum(-1) < p).sum()) + 1
        return torch.zeros_like(row, dtype=torch.bool).index_fill(0, order[:count], True)

    return keep


async def test_greedy_tokens_are_those_of_transformers_when_requests_share_the_batch(make_engine, reference):
    engine = await make_engine("embedded", max_batch_size=3)

    completions = await asyncio.gather(
        *(engine.complete(prompt, max_new_tokens=20, min_new_tokens=20, temperature=0) for prompt in PROMPTS)
    )

    assert [item.tokens for item in completions] == [reference_tokens(reference, prompt, 20) for prompt in PROMPTS]


async def test_greedy_tokens_are_those_of_transformers_when_requests_join_one_by_one(make_engine, reference):
    engine = await make_engine("embedded", steps=0, max_batch_size=2)
    tasks = []
    for prompt in PROMPTS:
        request = engine.request(prompt, max_new_tokens=9, min_new_tokens=9, temperature=0)
        tasks += await engine.start(request)
        await engine.step(2)
    engine.run_freely()

    completions = [join_chunks(await task) for task in tasks]

    assert [item.tokens for item in completions] == [reference_tokens(reference, prompt, 9) for prompt in PROMPTS]


async def test_greedy_tokens_are_right_when_the_cache_grows_in_the_middle(make_engine, reference, monkeypatch):
    monkeypatch.setattr("rayrl.inference.slot_cache.CAPACITY_STEP", 4)
    engine = await make_engine("embedded")
    completion = await engine.complete((2, 3), max_new_tokens=46, min_new_tokens=46, temperature=0)

    assert completion.tokens == reference_tokens(reference, (2, 3), 46)


@pytest.mark.parametrize(
    ("params", "temperature", "keep"),
    [
        ({}, 1.0, None),
        ({"temperature": 0.6}, 0.6, None),
        ({"temperature": 1.7}, 1.7, None),
        ({"temperature": 0}, 1.0, None),
        ({"top_k": 3}, 1.0, top_k(3)),
        ({"top_p": 0.7}, 1.0, top_p(0.7)),
        ({"top_p": 0.7, "temperature": 2.0}, 2.0, top_p(0.7)),
        ({"top_k": 4, "temperature": 0.5}, 0.5, top_k(4)),
    ],
)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    make_engine, reference, params, temperature, keep
):
    engine = await make_engine("embedded")

    completions = await asyncio.gather(
        *(
            engine.complete(prompt, max_new_tokens=12, min_new_tokens=0, seed=seed, **params)
            for seed, prompt in enumerate(PROMPTS)
        )
    )

    for prompt, item in zip(PROMPTS, completions, strict=True):
        expected = reference_logprobs(reference, prompt, item.tokens, temperature, keep)
        torch.testing.assert_close(torch.tensor(item.logprobs, dtype=torch.double), expected, rtol=0, atol=1e-4)


async def test_seeded_samples_are_the_same_whatever_else_is_in_the_batch(make_engine):
    alone = await make_engine("embedded")
    crowded = await make_engine("embedded", steps=0, max_batch_size=4, seed=9)
    wanted = {"max_new_tokens": 15, "min_new_tokens": 15, "seed": 123}
    expected = await alone.complete((4, 5, 6), **wanted)

    tasks = await crowded.start(*(crowded.request(prompt, max_new_tokens=7) for prompt in PROMPTS[:3]))
    await crowded.step(2)
    tasks += await crowded.start(crowded.request((4, 5, 6), **wanted), crowded.request((4, 5, 6), max_new_tokens=15))
    crowded.run_freely()

    assert join_chunks(await tasks[3]).tokens == expected.tokens
    assert join_chunks(await tasks[4]).tokens != expected.tokens


async def test_seeded_samples_go_on_elsewhere_from_the_tokens_that_are_there(make_engine):
    engine = await make_engine("embedded")
    whole = await engine.complete((4, 5), max_new_tokens=12, min_new_tokens=12, seed=5)

    rest = await engine.complete((4, 5, *whole.tokens[:4]), max_new_tokens=8, min_new_tokens=8, seed=5)

    assert rest.tokens == whole.tokens[4:]


async def test_group_shares_one_prefill_and_gets_what_single_requests_get(make_engine):
    engine = await make_engine("embedded", steps=0)
    single = await make_engine("embedded")
    prompt = (7, 8, 9, 10, 11, 12)
    other = (3, 4)
    wanted = {"max_new_tokens": 10, "min_new_tokens": 10}
    requests = [engine.request(prompt, seed=seed, **wanted) for seed in range(5)]
    requests.insert(2, engine.request(other, seed=77, **wanted))

    tasks = await engine.start(*requests)
    await engine.step()
    status = await engine.status()
    engine.run_freely()

    assert (status.total_prefill_tokens, status.num_running) == (len(prompt) + len(other), 6)
    for request, task in zip(requests, tasks, strict=True):
        expected = await single.complete(request.prompt_tokens, seed=request.params.seed, **wanted)
        completion = join_chunks(await task)
        assert completion.tokens == expected.tokens
        assert completion.logprobs == pytest.approx(expected.logprobs, rel=0, abs=1e-5)


async def test_prompts_that_do_not_fit_the_prefill_budget_wait_for_the_next_step(make_engine):
    engine = await make_engine("embedded", steps=0, prefill_tokens=6)
    tasks = await engine.start(*(engine.request(prompt, max_new_tokens=5, min_new_tokens=5) for prompt in PROMPTS))

    await engine.step()
    first = await engine.status()
    await engine.step()
    second = await engine.status()
    engine.run_freely()

    assert (first.num_running, second.num_running) == (1, 2)
    assert [len(join_chunks(await task).tokens) for task in tasks] == [5, 5, 5, 5]


async def test_tokens_follow_new_weights_when_they_are_loaded_in_flight(make_engine, reference):
    engine = await make_engine("embedded", steps=0)
    zeroed = {name: torch.zeros_like(tensor) for name, tensor in engine.weights.items()}
    (task,) = await engine.start(engine.request(max_new_tokens=6, min_new_tokens=6, temperature=0))
    await engine.step(3)

    await engine.engine.load(1, zeroed)
    engine.run_freely()

    completion = join_chunks(await task)
    assert completion.tokens[:3] == reference_tokens(reference, (2, 3, 4), 3)
    # All weights zero: all logits equal; 17 ids without the end that is not allowed yet.
    uniform = -torch.tensor(16.0).log().item()
    assert completion.logprobs[3:] == pytest.approx([uniform] * 3, rel=0, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "lack 'model.norm.weight'"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}),
            r"'model.norm.weight' has shape \(3,\)",
        ),
        (lambda weights: weights.update({"model.nrm.weight": torch.zeros(3)}), "did you mean 'model.norm.weight'"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(32).half()}), "is float16"),
    ],
)
async def test_old_weights_stay_when_the_new_ones_do_not_fit(make_engine, change, message):
    engine = await make_engine("embedded")
    before = await engine.complete(max_new_tokens=8, temperature=0)
    wrong = {name: tensor + 1 for name, tensor in engine.weights.items()}
    change(wrong)

    with pytest.raises(EngineError, match=message):
        await engine.engine.load(5, wrong)

    assert (await engine.status()).version == 0
    assert await engine.complete(max_new_tokens=8, temperature=0) != before  # another id
    assert (await engine.complete(max_new_tokens=8, temperature=0)).tokens == before.tokens


async def test_request_fails_alone_when_its_logits_are_not_finite_and_its_slot_is_clean_afterwards(make_engine):
    engine = await make_engine("embedded", max_batch_size=2)
    short, long = (2, 3), tuple(range(2, 14))
    wanted = {"max_new_tokens": 5, "min_new_tokens": 5, "temperature": 0}
    expected = [(await engine.complete(prompt, **wanted)).tokens for prompt in (short, long)]
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in engine.weights.items()}

    await engine.engine.load(1, broken)
    with pytest.raises(EngineError, match="version 1 give logits that are not finite"):
        await engine.complete(long)
    await engine.engine.load(2, engine.weights)

    # The short one is now in the slot of the broken one, and what lies beyond its end is masked, not overwritten.
    completions = await asyncio.gather(*(engine.complete(prompt, **wanted) for prompt in (short, long)))
    assert [item.tokens for item in completions] == expected


async def test_start_raises_what_the_model_says_when_it_cannot_be_loaded(make_engine):
    from rayrl.config.inference import InferenceConfig, TransformersEngine
    from rayrl.config.model import ModelConfig
    from rayrl.inference.embedded import embedded_engine

    engine = embedded_engine(
        lambda: load_model(ModelConfig(path="nowhere")), InferenceConfig(engine=TransformersEngine(type="transformers"))
    )

    with pytest.raises(ModelError, match="nowhere"):
        await engine.start()
    assert "nowhere" in (await engine.status()).failure
    await engine.close()


async def test_model_with_another_kind_of_attention_is_refused_at_the_start():
    from transformers import GptOssConfig, GptOssForCausalLM

    from rayrl.inference.slot_attention import ATTENTION_NAME, register_slot_attention

    register_slot_attention()
    config = GptOssConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        attn_implementation=ATTENTION_NAME,
    )
    model = EmbeddedModel(
        lambda: LoadedModel(model=GptOssForCausalLM(config).eval(), max_context=16, eos_token_ids=(), decode=None),
        max_batch_size=2,
    )

    with pytest.raises(ModelError, match="s_aux"):
        model.open()
