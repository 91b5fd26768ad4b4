"""Adapters alone are published: engines make of them, and of their model folder, the weights of the trainer."""

import asyncio
from dataclasses import dataclass, field

import pytest
import torch

from rayrl.config.inference import InferenceConfig, TransformersEngine
from rayrl.config.model import ModelConfig
from rayrl.config.training import LoraConfig
from rayrl.config.transfer import TransferConfig
from rayrl.errors import EngineError
from rayrl.inference.engine_actor import EngineActor
from rayrl.inference.settings import EngineSettings
from rayrl.infra.weight_manifest import WeightManifest, checksum_of, spec_of
from rayrl.infra.weight_route import ReceivedWeights
from rayrl.models.adapters import adapter_names
from rayrl.models.loading import load_causal_lm
from rayrl.types.sampling import GenerationRequest, SamplingParams, join_chunks

pytestmark = pytest.mark.asyncio(loop_scope="session")

LORA = LoraConfig(r=4, alpha=8.0, target_modules=("q_proj", "down_proj"))
SCALING = 2.0
PROMPTS = [tuple(2 + (3 * index + offset) % 14 for offset in range(1 + index % 7)) for index in range(8)]


@dataclass
class HandedOver:
    """A route over which the tensors of one version have come."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def receive(self, manifest, parcels, timeout_s, memory=None):
        return ReceivedWeights(tensors=self.tensors, digests=("aa",))

    def close(self):
        pass


def is_adapted(name):
    return name.endswith(("q_proj.weight", "down_proj.weight"))


def adapters_of(model, seed, size=0.5):
    """A and B for the targets; with `size` 0 they add nothing."""
    generator = torch.Generator().manual_seed(seed)
    adapters = {}
    for name, weight in model.named_parameters():
        if is_adapted(name):
            down, up = adapter_names(name)
            adapters[down] = torch.randn(LORA.r, weight.shape[1], generator=generator)
            adapters[up] = size * torch.randn(weight.shape[0], LORA.r, generator=generator)
    return adapters


def merged(model, adapters):
    """Summed in float64."""
    weights = {}
    for name, weight in model.named_parameters():
        weights[name] = weight.detach().clone()
        if is_adapted(name):
            down, up = (adapters[part].double() for part in adapter_names(name))
            weights[name] = (weight.detach().double() + SCALING * up @ down).float()
    return weights


def manifest_of(tensors, version):
    specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
    return WeightManifest(version=version, tensors=specs, bucket_bytes=4096)


def settings(folder):
    return EngineSettings(
        model=ModelConfig(path=str(folder)),
        inference=InferenceConfig(engine=TransformersEngine(type="transformers", max_batch_size=8)),
        transfer=TransferConfig(lora="adapters"),
        seed=1,
        lora=LORA,
    )


async def publish(actor, adapters, version):
    manifest = manifest_of(adapters, version)
    await actor.prepare(manifest)
    actor._route = HandedOver(adapters)
    await actor.receive(manifest)
    await actor.commit(version)
    return manifest


async def greedy(actor, version):
    async def one(index, prompt):
        params = SamplingParams(max_new_tokens=8, min_new_tokens=8, temperature=0)
        request = GenerationRequest(request_id=f"{version}-{index}", prompt_tokens=prompt, params=params)
        return join_chunks([chunk async for chunk in actor._engine.generate(request)])

    return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(PROMPTS)))


def reference_of(model, weights, prompt, tokens):
    """(greedy token, logprob of the sampled token) at each place, from transformers; the end token is excluded."""
    with torch.no_grad():
        output = torch.func.functional_call(
            model,
            {**dict(model.named_parameters()), **weights},
            (torch.tensor([[*prompt, *tokens]]),),
            tie_weights=True,
        )
    logits = output.logits[0, len(prompt) - 1 : -1]
    logits[:, 1] = -torch.inf
    logprobs = logits.log_softmax(-1)
    return logprobs.argmax(-1).tolist(), logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize("kind", ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_tokens_and_logprobs_are_those_of_the_merged_model_after_each_version(
    kind, tiny_model, tiny_vllm_model, vllm_parts
):
    folder = tiny_model if kind == "embedded" else tiny_vllm_model
    actor = EngineActor(0, settings(folder))
    if kind == "vllm":
        actor._engine = vllm_parts[0]
    await actor.ready()
    model = load_causal_lm(folder)
    seen = []
    for version, adapters in enumerate([adapters_of(model, 1, 0.0), adapters_of(model, 2), adapters_of(model, 3)]):
        await publish(actor, adapters, version)

        completions = await greedy(actor, version)

        weights = merged(model, adapters)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            tokens, logprobs = reference_of(model, weights, prompt, completion.tokens)
            assert list(completion.tokens) == tokens
            assert completion.logprobs == pytest.approx(logprobs, rel=0, abs=1e-3)
            assert {span.version for span in completion.spans} == {version}
        seen.append(tuple(completion.tokens for completion in completions))
    assert len(set(seen)) == 3, "the adapters make a difference"
    if kind == "embedded":
        await actor.close()


@pytest.fixture(scope="session")
def model(tiny_model):
    return load_causal_lm(tiny_model)


async def test_engine_holds_the_base_beside_the_adapters_after_many_versions(tiny_model, model):
    actor = EngineActor(0, settings(tiny_model))
    await actor.ready()
    for version in range(5):
        adapters = adapters_of(model, version)
        manifest = await publish(actor, adapters, version)

        found = await actor.weight_checksums(manifest)

        expected = {name: checksum_of(tensor) for name, tensor in adapters.items()}
        expected |= {name: checksum_of(item) for name, item in model.named_parameters() if not is_adapted(name)}
        assert found == expected, "the adapters that came, and all that has none; sums may be rounded elsewhere"
        held = actor._engine._model.weights
        for name, weight in merged(model, adapters).items():
            torch.testing.assert_close(held[name].detach(), weight, rtol=1e-5, atol=1e-6)
    await actor.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sent: sent.update({"model.norm.weight": torch.ones(32)}), r"'model\.norm\.weight' is none of a weight"),
        (lambda sent: sent.update({A: torch.zeros(8, 32)}), r"lora_A.weight' is \(\(8, 32\).* it is \(\(4, 32\)"),
        (lambda sent: sent.update({A: torch.zeros(4, 32).bfloat16()}), r"lora_A.weight' is .*bfloat16.*float32"),
        (lambda sent: sent.pop(B), r"lora_B.weight' does not come"),
        (lambda sent: sent.update(other=torch.zeros(1)), "'other' is none of a weight"),
    ],
)
async def test_adapters_that_do_not_fit_are_refused_before_they_come(tiny_model, model, change, message):
    actor = EngineActor(0, settings(tiny_model))
    await actor.ready()
    await publish(actor, adapters_of(model, 1), 0)
    sent = adapters_of(model, 2)
    change(sent)

    with pytest.raises(EngineError, match=message):
        await actor.prepare(manifest_of(sent, 1))

    await publish(actor, adapters_of(model, 2), 1)
    assert (await actor.status()).version == 1
    await actor.close()


A, B = adapter_names("model.layers.0.self_attn.q_proj.weight")
