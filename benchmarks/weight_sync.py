"""MB/s of a whole publication of weights per route, beside bare broadcasts of the same bytes, alternating in one run.

    trainer actor (TrainWorker) ──gloo | object_store | disk──> engine actor (EngineActor, embedded engine)
           └───────────── raw: one broadcast of all bytes; per parameter: one broadcast for each ─────────┘

A publication is everything that the driver does for a version: manifest, prepare, transfer, verify, commit, release.
Each round measures every way once, in turn; figures are medians over rounds. benchmarks/README.md says how to read
them.
"""

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
import torch

from rayrl.config.inference import InferenceConfig, TransformersEngine
from rayrl.config.model import ModelConfig
from rayrl.config.training import TrainingConfig
from rayrl.config.transfer import TransferConfig
from rayrl.inference.engine_actor import EngineActor
from rayrl.inference.settings import EngineSettings
from rayrl.infra.actor_group import ActorGroup
from rayrl.infra.bucket_stream import BucketDigests
from rayrl.infra.buckets import plan_buckets
from rayrl.infra.collective_group import CollectiveGroup
from rayrl.infra.message_source import MessageSource
from rayrl.infra.messages import MessageSizes, plan_messages
from rayrl.infra.phase_times import PhaseTimes
from rayrl.infra.publication import Publication, verify
from rayrl.infra.weight_manifest import WeightManifest, checked_tensors
from rayrl.infra.weight_route import RouteKind, route_kind
from rayrl.training.settings import TrainWorkerSettings
from rayrl.training.worker import TrainWorker
from rayrl.types.sampling import GenerationRequest, SamplingParams

SECONDS = 120.0
ROUTES = ("gloo", "object_store", "disk")
RAW, PER_PARAMETER, PER_CALL = "raw broadcast", "broadcast per parameter", "call and broadcast per parameter"


class Switching:
    """What both actors need to change routes, and to broadcast without any of rayrl's transfer."""

    _raw: CollectiveGroup
    _buffer: torch.Tensor

    def use(self, transfer: TransferConfig) -> None:
        """Take another route from now on."""
        if self._route is not None:
            self._route.close()
        self._route = None
        self._settings = replace(self._settings, transfer=transfer)

    def join_raw(self, rank: int, address: Any, members: tuple[str, ...], num_bytes: int) -> None:
        self._raw = CollectiveGroup.join(
            address,
            name="raw",
            epoch=1,
            rank=rank,
            members=members,
            backend="gloo",
            timeout_s=SECONDS,
            hosted=self._transfer_rendezvous if rank == 0 else None,
        )
        # Touched, so that no page is made while it is measured.
        self._buffer = torch.ones(num_bytes, dtype=torch.uint8)

    def nothing(self) -> None:
        pass

    def broadcast_all(self) -> None:
        self._raw.broadcast(self._buffer, 0)

    def broadcast_each(self, manifest: WeightManifest) -> None:
        for spec in manifest.tensors:
            self._raw.broadcast(self._buffer[: spec.num_bytes], 0)

    def broadcast_one(self, num_bytes: int) -> None:
        self._raw.broadcast(self._buffer[:num_bytes], 0)


class Sender(Switching, TrainWorker):
    """The trainer; its methods run one at a time."""

    def stages(self, version: int) -> dict[str, float]:
        """Return the seconds of each pass over the bytes, alone."""
        manifest = self.weight_manifest(version)
        messages = plan_messages(plan_buckets(manifest.tensors, manifest.bucket_bytes), MessageSizes())
        times = PhaseTimes()
        tensors = self._ready_engine.weight_tensors(self._settings.model.dtype)
        source = MessageSource(
            checked_tensors(manifest, tensors), device=torch.device("cpu"), num_buffers=3, times=times
        )
        digests = BucketDigests(len(manifest.tensors))
        for message, part in zip(messages, source.of(messages), strict=True):
            with times.of("digest"):
                digests.add(message.bucket, part)
        copy = torch.empty_like(self._buffer)
        touch = _seconds(lambda: copy.fill_(1))
        return {
            **times.seconds,
            "copy all": _seconds(lambda: copy.copy_(self._buffer)),
            "first touch of as much": touch,
            "messages": float(len(messages)),
            "packed share": sum(m.num_bytes for m in messages if not m.is_direct) / manifest.num_bytes,
        }


class Receiver(Switching, EngineActor):
    """The engine; everything that blocks runs in a thread."""

    _transfer_rendezvous = None

    async def run_raw(self, method: str, *args: Any) -> None:
        await asyncio.to_thread(getattr(self, method), *args)

    async def generate_and_time(self, num_requests: int, num_tokens: int) -> list[float]:
        """Generate, and return when each step's tokens came."""
        params = SamplingParams(max_new_tokens=num_tokens, min_new_tokens=num_tokens, temperature=1.0)
        requests = [
            GenerationRequest(request_id=f"{time.monotonic()}-{i}", prompt_tokens=tuple(range(5, 37)), params=params)
            for i in range(num_requests)
        ]
        times: list[float] = []
        async for _ in self.generate(requests):
            times.append(time.perf_counter())
        return times


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Bench:
    """The actors and what is done with them."""

    def __init__(self, train: ActorGroup, engines: ActorGroup, folder: str, bucket_bytes: int) -> None:
        self.train = train
        self.engines = engines
        self.folder = folder
        self.bucket_bytes = bucket_bytes
        self.version = 0
        self.epoch = 1
        self.address: Any = None
        self.manifest: WeightManifest | None = None
        self.phases: dict[str, list[dict[str, float]]] = {}

    @property
    def members(self) -> tuple[str, ...]:
        return ("train-0", *(member.name for member in self.engines.members))

    async def connect(self) -> None:
        self.address = await self._sender("host_transfer_rendezvous")
        self.manifest = await self._sender("weight_manifest", 0)
        size = sum(bucket.num_bytes for bucket in plan_buckets(self.manifest.tensors, self.bucket_bytes))
        await asyncio.gather(
            self._sender("join_raw", 0, self.address, self.members, size),
            *(
                self._engine(rank, "run_raw", "join_raw", rank, self.address, self.members, size)
                for rank in range(1, len(self.members))
            ),
        )

    async def use(self, route: str) -> None:
        transfer = TransferConfig(backend=route, bucket_bytes=self.bucket_bytes, folder=self.folder)
        await self._sender("use", transfer)
        await self._engines("use", transfer)
        if route_kind(route) is RouteKind.COLLECTIVE:
            self.epoch += 1
            await asyncio.gather(
                self._sender("join_transfer", self.address, self.epoch, self.members, route, SECONDS),
                *(
                    self._engine(rank, "join_transfer", self.address, self.epoch, rank, self.members, route, SECONDS)
                    for rank in range(1, len(self.members))
                ),
            )

    async def publish(self, route: str) -> dict[str, float]:
        """Publish the next version as the driver does, and return the seconds of its phases."""
        await self.use(route)
        self.version += 1
        marks = [time.perf_counter()]
        manifest = await self._sender("weight_manifest", self.version)
        described = time.perf_counter()
        await self._engines("prepare", manifest)
        marks.append(time.perf_counter())
        if route_kind(route) is RouteKind.COLLECTIVE:
            sent, acks = await asyncio.gather(
                self._sender("send_weights", self.version), self._engines("receive", manifest, (), SECONDS)
            )
            stored = time.perf_counter()
        else:
            sent = await self._sender("send_weights", self.version)
            stored = time.perf_counter()
            acks = await self._engines("receive", manifest, (sent.parcel,), SECONDS)
        verdict = verify(Publication(version=self.version, engines=self.members[1:]), sent.digests, acks)
        assert verdict.ok, verdict.bad_engines
        marks.append(time.perf_counter())
        times = await self._engines("commit", self.version)
        marks.append(time.perf_counter())
        phases = {f"sender {name}": seconds for name, seconds in sent.times.items()}
        phases |= {f"engine {name}": max(ack.times.get(name, 0.0) for ack in acks) for name in acks[0].times}
        del acks
        if route_kind(route) is RouteKind.STORED:
            await self._sender("release_weights", self.version)
        marks.append(time.perf_counter())
        return {
            "total": marks[-1] - marks[0],
            "manifest": described - marks[0],
            "prepare": marks[1] - described,
            "transfer": marks[2] - marks[1],
            "of it send": stored - marks[1],
            "commit": marks[3] - marks[2],
            "release": marks[4] - marks[3],
            "load": max(item.load_s for item in times),
            "pause": max(item.pause_s for item in times),
            **phases,
        }

    async def round_trip(self) -> float:
        """Return the seconds of a call to each actor that does nothing."""
        start = time.perf_counter()
        await self._sender("nothing")
        await self._engines("run_raw", "nothing")
        return time.perf_counter() - start

    async def raw(self, method: str, *args: Any) -> float:
        start = time.perf_counter()
        await asyncio.gather(self._sender(method, *args), self._engines("run_raw", method, *args))
        return time.perf_counter() - start

    async def call_per_parameter(self) -> float:
        assert self.manifest is not None
        start = time.perf_counter()
        for spec in self.manifest.tensors:
            await asyncio.gather(
                self._sender("broadcast_one", spec.num_bytes), self._engines("run_raw", "broadcast_one", spec.num_bytes)
            )
        return time.perf_counter() - start

    async def pause_while_generating(self, route: str) -> dict[str, float]:
        """Publish in the middle of generation; compare the longest gap between two steps with the time of the load."""
        running = asyncio.ensure_future(self._engine(1, "generate_and_time", 8, 60))
        await asyncio.sleep(1.0)
        phases = await self.publish(route)
        times: list[float] = await running
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return {**phases, "longest gap": max(gaps), "usual gap": statistics.median(gaps)}

    async def _sender(self, method: str, *args: Any) -> Any:
        return await self.train.call(0, method, *args, seconds=SECONDS, phase=method)

    async def _engine(self, rank: int, method: str, *args: Any) -> Any:
        return await self.engines.call(rank - 1, method, *args, seconds=SECONDS, phase=method)

    async def _engines(self, method: str, *args: Any) -> Any:
        return await self.engines.call_all(method, *args, seconds=SECONDS, phase=method)


async def start(model: ModelConfig, folder: str, bucket_bytes: int, num_engines: int) -> Bench:
    """Start one trainer and the engines."""
    transfer = TransferConfig(backend="gloo", bucket_bytes=bucket_bytes, folder=folder)
    settings = TrainWorkerSettings(
        model=model,
        training=TrainingConfig.model_validate({"optimizer": {"lr": 1e-5}}),
        algorithm=None,
        temperature=1.0,
        minibatches=1,
        num_steps=1,
        max_new_tokens=16,
        seed=1,
        transfer=transfer,
    )
    inference = InferenceConfig(engine=TransformersEngine(type="transformers", max_batch_size=8), stream_interval=1)
    engine_settings = EngineSettings(model=model, inference=inference, transfer=transfer, seed=1)
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    common: dict[str, Any] = {"env": env, "start_timeout_s": SECONDS}
    train = await ActorGroup.spawn(
        "train", Sender, args_per_member=[(0, 1, settings)], options_per_member=[{"num_cpus": 1}], **common
    )
    engines = await ActorGroup.spawn(
        "inference",
        Receiver,
        args_per_member=[(index, engine_settings) for index in range(num_engines)],
        options_per_member=[{"num_cpus": 1}] * num_engines,
        max_concurrency=1000,
        **common,
    )
    bench = Bench(train, engines, folder, bucket_bytes)
    address = await bench._sender("host_training_rendezvous")
    await bench._sender("setup", address)
    await bench.connect()
    return bench


async def measure(bench: Bench, rounds: int, routes: tuple[str, ...]) -> dict[str, Any]:
    """Alternate all ways; the first round is not counted."""
    seconds: dict[str, list[float]] = {}
    phases: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds + 1):
        found = {RAW: await bench.raw("broadcast_all")}
        found[PER_PARAMETER] = await bench.raw("broadcast_each", bench.manifest)
        found[PER_CALL] = await bench.call_per_parameter()
        for route in routes:
            result = await bench.publish(route)
            found[route] = result["total"]
            if number:
                phases.setdefault(route, []).append(result)
        if number:
            for name, value in found.items():
                seconds.setdefault(name, []).append(value)
        print(f"round {number}: " + ", ".join(f"{name} {value:.3f} s" for name, value in found.items()), flush=True)
    stages = [{**await bench._sender("stages", 0), "two calls": await bench.round_trip()} for _ in range(3)]
    pauses = [await bench.pause_while_generating(routes[0]) for _ in range(3)]
    assert bench.manifest is not None
    return {
        "num_bytes": bench.manifest.num_bytes,
        "num_tensors": len(bench.manifest.tensors),
        "seconds": seconds,
        "phases": {route: _medians(rows) for route, rows in phases.items()},
        "stages_alone": _medians(stages),
        "while_generating": _medians(pauses),
    }


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def table(result: dict[str, Any]) -> str:
    """Return the figures as text."""
    median = {name: statistics.median(values) for name, values in result["seconds"].items()}
    megabytes = result["num_bytes"] / 1e6
    lines = [f"{megabytes:.0f} MB, {result['num_tensors']} tensors", ""]
    lines.append(
        f"{'way':<34} {'s':>7} {'least':>7} {'MB/s':>7} {'/ raw':>7} {'/ per parameter':>16} {'/ with calls':>13}"
    )
    for name, value in median.items():
        ratios = (median[RAW] / value, median[PER_PARAMETER] / value, median[PER_CALL] / value)
        least = min(result["seconds"][name])
        shares = f"{ratios[0]:7.2f} {ratios[1]:16.2f} {ratios[2]:13.2f}"
        lines.append(f"{name:<34} {value:7.3f} {least:7.3f} {megabytes / value:7.0f} {shares}")
    lines += ["", "where it goes (s; sender and engine work at the same time where the route is collective)"]
    rows = {**result["phases"], "while generating": result["while_generating"], "alone": result["stages_alone"]}
    lines += [
        f"{name}: " + ", ".join(f"{phase} {value:.3f}" for phase, value in row.items()) for name, row in rows.items()
    ]
    return "\n".join(lines)


@contextmanager
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


async def run(arguments: argparse.Namespace, model: ModelConfig) -> dict[str, Any]:
    """Start, measure, close."""
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        bench = await start(model, folder, arguments.bucket_mib << 20, arguments.engines)
        try:
            return await measure(bench, arguments.rounds, tuple(arguments.routes))
        finally:
            await bench.engines.shutdown(20.0)
            await bench.train.shutdown(20.0)


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--routes", nargs="+", default=ROUTES, choices=ROUTES)
    parser.add_argument("--disk", default=None, help="where the disk route writes; the system's temporary folder")
    parser.add_argument("--output", default=None, help="file for all figures as JSON")
    arguments = parser.parse_args()
    model = ModelConfig(path=str(Path(arguments.model).absolute()), dtype=arguments.dtype, max_context=256)
    with _cluster():
        result = asyncio.run(run(arguments, model))
    result |= {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    print(table(result))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
