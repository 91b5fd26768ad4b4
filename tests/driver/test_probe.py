"""What engines hold against what the trainer holds: the verdict, and a real engine that keeps one old tensor."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrl.config.inference import InferenceConfig, TransformersEngine
from rayrl.config.model import ModelConfig
from rayrl.config.run import RunConfig
from rayrl.driver.probe import WeightProbe
from rayrl.driver.probe_verdict import EngineProbe, judge
from rayrl.errors import EngineError
from rayrl.inference.embedded import EmbeddedModel, load_model
from rayrl.inference.threaded import ThreadedEngine
from rayrl.infra.identity import ActorLabel
from rayrl.infra.weight_manifest import WeightManifest, checksum_of, spec_of
from rayrl.models.loading import load_causal_lm
from rayrl.models.tiny import create_tiny_model
from rayrl.types.sampling import join_chunks


def probe_of(**changes: Any) -> EngineProbe:
    fields: dict[str, Any] = {
        "engine": "inference-0",
        "version": 3,
        "checksums": {"a": "1", "b": "2"},
        "tokens": (7, 8),
        "logprobs": (-1.0, -2.0),
        "scores": (-1.0, -2.0),
    }
    return EngineProbe(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "bad", "alarm"),
    [
        ({}, None, None),
        ({"checksums": {"b": "2"}}, None, None),
        ({"checksums": {"a": "1", "b": "other"}}, "after version 3 it holds other values of b than", None),
        ({"checksums": {"a": "x", "b": "y"}}, "of a and 1 more than the trainer", None),
        ({"version": 2}, "samples with version 2, published is 3", None),
        ({"version": None}, "samples with version None", None),
        ({"scores": (-1.2, -2.0)}, None, None),
        ({"scores": (-1.3, -2.0)}, None, r"0.15 nats over 2 tokens, transfer.probe_tolerance=0.1"),
        ({"tokens": (), "logprobs": (), "scores": ()}, None, None),
    ],
)
def test_engine_is_bad_for_wrong_weights_and_alarming_for_far_logprobs(changes: Any, bad: Any, alarm: Any) -> None:
    verdict = judge(3, {"a": "1", "b": "2", "c": "3"}, [probe_of(**changes)], tolerance=0.1, unanswered={})

    assert bool(verdict.bad_engines) == (bad is not None)
    assert bool(verdict.alarms) == (alarm is not None)
    assert (bad or "") in verdict.bad_engines.get("inference-0", "")
    assert (alarm or "") in verdict.alarms.get("inference-0", "")


def test_engine_that_did_not_answer_is_bad_and_the_worst_difference_is_the_metric() -> None:
    probes = [probe_of(), probe_of(engine="inference-1", scores=(-1.5, -2.0))]

    verdict = judge(3, {"a": "1", "b": "2"}, probes, tolerance=1.0, unanswered={"inference-2": "it died"})

    assert verdict.bad_engines == {"inference-2": "it died"}
    assert verdict.metrics == {
        "probe/logprob_diff": pytest.approx(0.25, rel=1e-9),
        "probe/compared_weights": 4.0,
        "probe/bad_engines": 1.0,
    }


class ForgetfulModel(EmbeddedModel):
    """Keeps the old values of some weights, and says nothing."""

    forgotten: tuple[str, ...] = ()

    def load(self, tensors: Any, *, may_keep: bool = False) -> bool:
        kept = {name: self.weights[name] if name in self.forgotten else item for name, item in tensors.items()}
        return super().load(kept, may_keep=may_keep)


class Handle:
    """What an engine actor's handle offers to the probe, without an actor."""

    def __init__(self, engine: ThreadedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        method = getattr(self, f"_{name}")
        return type("Remote", (), {"remote": staticmethod(method)})

    async def _weight_checksums(self, manifest: WeightManifest) -> Any:
        return await self._engine.checksums([(spec.name, spec.shape, spec.dtype) for spec in manifest.tensors])

    async def _sample_probe(self, request: Any, timeout_s: float) -> Any:
        return join_chunks([chunk async for chunk in self._engine.generate(request)])


class Engines:
    """An actor group as the probe sees it."""

    def __init__(self, handles: list[Any]) -> None:
        self.members = [
            type("M", (), {"name": f"inference-{i}", "handle": handle, "label": ActorLabel(name=f"inference-{i}")})
            for i, handle in enumerate(handles)
        ]


class Trainer:
    """A training group of one whose policy is the model of transformers with given weights."""

    def __init__(self, model: Any) -> None:
        self._model = model

    async def call(self, index: int, method: str, *args: Any, seconds: float, phase: str) -> Any:
        return (await self.call_all(method, *args, seconds=seconds, phase=phase))[0]

    async def call_all(self, method: str, *args: Any, seconds: float, phase: str) -> list[Any]:
        return [getattr(self, f"_{method}")(*args)]

    def _weight_manifest(self, version: int) -> WeightManifest:
        tensors = tuple(spec_of(name, item) for name, item in self._model.named_parameters())
        return WeightManifest(version=version, tensors=tensors, bucket_bytes=4096)

    def _weight_checksums(self) -> dict[str, str]:
        return {name: checksum_of(item) for name, item in self._model.named_parameters()}

    @torch.no_grad()
    def _score_probe(self, prompt: Any, completions: Any) -> list[list[float]]:
        rows = []
        for completion in completions:
            logits = self._model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            rows.append(logits.log_softmax(-1)[range(len(completion)), list(completion)].tolist())
        return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(tmp_path_factory.mktemp("models") / "tiny", alphabet="0123456789+-=. ", max_context=64)


async def _start(folder: Path, forgotten: tuple[str, ...]) -> ThreadedEngine:
    config = InferenceConfig(engine=TransformersEngine(type="transformers", max_batch_size=2))
    model = ForgetfulModel(lambda: load_model(ModelConfig(path=str(folder))), max_batch_size=2)
    engine = ThreadedEngine(model, config, max_batch_size=2, prefill_tokens=64, name="engine", seed=0)
    await engine.start()
    await engine.load(0, dict(load_causal_lm(folder).named_parameters()))
    model.forgotten = forgotten
    return engine


@pytest.fixture
def config(repo_root: Path, folder: Path) -> RunConfig:
    overrides = ["transfer.probe_every=5", "transfer.probe_tolerance=0.001", f"model.path={folder}"]
    return RunConfig.load(repo_root / "configs" / "smollm2_chain_sum.yaml", overrides)


class Quarantine:
    """The publisher as the probe sees it."""

    def __init__(self, *serving: str) -> None:
        self.serving = dict.fromkeys(serving)
        self.told: list[Any] = []

    def quarantine_wrong(self, reasons: Any) -> None:
        self.told.append(reasons)


class Notes:
    """The ledger as the probe sees it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, Any]] = []

    def record_event(self, kind: str, step: int, detail: Any) -> None:
        self.events.append((kind, step, detail))


@pytest.fixture
def ledger() -> Notes:
    return Notes()


@pytest.mark.asyncio
async def test_probe_catches_an_engine_that_silently_keeps_one_old_tensor(
    folder: Path, config: RunConfig, ledger: Notes
) -> None:
    policy = load_causal_lm(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    engines = [await _start(folder, forgotten) for forgotten in ((), ("model.layers.0.mlp.up_proj.weight",))]
    await asyncio.gather(*(engine.load(1, dict(policy.named_parameters())) for engine in engines))
    publisher = Quarantine("inference-0", "inference-1")
    probe = WeightProbe(
        config=config,
        train=Trainer(policy),  # type: ignore[arg-type]
        publisher=publisher,  # type: ignore[arg-type]
        inference=Engines([Handle(engine) for engine in engines]),  # type: ignore[arg-type]
        ledger=ledger,  # type: ignore[arg-type]
    )

    verdict = await probe.check(1, step=7)
    await probe.check_if_due(5, step=8)
    assert publisher.told == [], "five versions have not gone by"
    probe._last = None
    metrics = await probe.check_if_due(1, step=9)

    reason = "after version 1 it holds other values of model.layers.0.mlp.up_proj.weight than the trainer"
    assert verdict.bad_engines == {"inference-1": reason}
    assert set(verdict.alarms) == {"inference-1"}, "its logprobs show it, too; those of the other agree within 0.001"
    assert publisher.told == [verdict.bad_engines]
    assert metrics["probe/logprob_diff"] > 0.001
    detail = {"engine": "inference-1", "version": 1, "reason": reason}
    assert ledger.events[0] == ("probe_bad_engine", 7, detail)
    assert [event[:2] for event in ledger.events] == [
        ("probe_bad_engine", 7),
        ("probe_alarm", 7),
        ("probe_bad_engine", 9),
        ("probe_alarm", 9),
    ]
    for engine in engines:
        await engine.close()


@pytest.mark.asyncio
async def test_engine_that_fails_while_it_is_asked_is_quarantined_and_one_without_the_version_is_not_asked(
    folder: Path, config: RunConfig, ledger: Notes
) -> None:
    class Broken(Handle):
        async def _sample_probe(self, request: Any, timeout_s: float) -> Any:
            raise EngineError("the cache is broken")

    engine = await _start(folder, ())
    publisher = Quarantine("inference-0")
    probe = WeightProbe(
        config=config,
        train=Trainer(load_causal_lm(folder)),  # type: ignore[arg-type]
        publisher=publisher,  # type: ignore[arg-type]
        inference=Engines([Broken(engine), None]),  # type: ignore[arg-type]
        ledger=ledger,  # type: ignore[arg-type]
    )

    metrics = await probe.check_if_due(0, step=0)

    assert publisher.told == [{"inference-0": "the cache is broken"}]
    assert metrics["probe/bad_engines"] == 1
    await engine.close()


def test_probe_is_due_at_first_then_every_so_many_versions_and_never_for_scripts(
    config: RunConfig, ledger: Notes
) -> None:
    parts: dict[str, Any] = {"train": None, "inference": None, "publisher": None, "ledger": ledger}
    probe = WeightProbe(config=config, **parts)
    off = config.model_copy(update={"transfer": config.transfer.model_copy(update={"probe_every": 0})})

    assert probe.is_due(40)
    probe._last = 40
    assert [probe.is_due(version) for version in (41, 44, 45, 46, 30)] == [False, False, True, True, True]
    assert not WeightProbe(config=off, **parts).is_due(0)
