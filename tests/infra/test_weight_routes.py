"""One contract for all routes of weights: the same bits, the same digests, and every difference is seen."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayrl.config.run import RunConfig
from rayrl.config.transfer import TransferConfig
from rayrl.errors import ConfigError, TransferError
from rayrl.infra import object_store_route
from rayrl.infra.buckets import TensorSpec
from rayrl.infra.collective_group import CollectiveGroup, host_rendezvous
from rayrl.infra.disk_route import WEIGHTS_FILE, DiskRoute, latest_version, read_weights, version_folder
from rayrl.infra.object_store_route import ObjectStoreRoute
from rayrl.infra.publication import EngineAck, Publication, verify
from rayrl.infra.route_table import make_stored_route
from rayrl.infra.weight_manifest import WeightManifest, spec_of
from rayrl.infra.weight_route import (
    CollectiveRoute,
    Parcel,
    ReceivedWeights,
    RouteKind,
    SentWeights,
    WeightRoute,
    parcel_for,
    route_kind,
)

TIMEOUT_S = 30.0
Damage = Callable[[], None]


@dataclass
class Sides:
    """Both ends of a route in this process."""

    name: str
    sender: WeightRoute
    receiver: WeightRoute
    damage: Callable[[SentWeights | None], SentWeights | None]
    """Flips one bit of what is on its way; called after `send` on stored routes and before both on collective ones."""

    def move(
        self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, damaged: bool = False
    ) -> tuple[SentWeights, ReceivedWeights]:
        if route_kind(self.name) is RouteKind.COLLECTIVE:  # type: ignore[arg-type]
            if damaged:
                self.damage(None)
            with ThreadPoolExecutor(1) as pool:
                arriving = pool.submit(self.receiver.receive, manifest, (), TIMEOUT_S)
                sent = self.sender.send(manifest, tensors)
                return sent, arriving.result()
        sent = self.sender.send(manifest, tensors)
        found = self.damage(sent) if damaged else sent
        return sent, self.receiver.receive(manifest, [found.parcel], TIMEOUT_S)


class DamagingGroup:
    """Delivers the third broadcast with one bit flipped."""

    def __init__(self, group: CollectiveGroup) -> None:
        self._group = group
        self.left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def start_broadcast(self, tensor: Tensor, source: int) -> Any:
        pending = self._group.start_broadcast(tensor, source)
        if self.left is not None:
            self.left -= 1
            if self.left == -1:
                pending.wait()
                tensor[5] ^= 1
        return pending


def _gloo() -> Sides:
    hosted = host_rendezvous("127.0.0.1", TIMEOUT_S)
    common: dict[str, Any] = {
        "name": "weights",
        "epoch": 1,
        "members": ("train-0", "inference-0"),
        "backend": "gloo",
        "timeout_s": TIMEOUT_S,
    }
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(CollectiveGroup.join, hosted.address, rank=1, **common)
        sender = CollectiveGroup.join(hosted.address, rank=0, hosted=hosted, **common)
        receiver = DamagingGroup(joined.result())

    def damage(sent: SentWeights | None) -> None:
        receiver.left = 2

    return Sides("gloo", CollectiveRoute(sender), CollectiveRoute(receiver), damage)  # type: ignore[arg-type]


def _object_store() -> Sides:
    def damage(sent: SentWeights | None) -> SentWeights:
        import ray

        refs = list(sent.parcel.content)
        arrays = [array.copy() for array in ray.get(refs[2], timeout=TIMEOUT_S)]
        arrays[0][5] ^= 1
        refs[2] = ray.put(arrays)
        return replace(sent, parcel=replace(sent.parcel, content=tuple(refs)))

    routes = [make_stored_route(TransferConfig(backend="object_store"), None) for _ in range(2)]
    return Sides("object_store", *routes, damage)


def _disk(folder: Any) -> Sides:
    def damage(sent: SentWeights | None) -> SentWeights:
        path = f"{sent.parcel.content}/{WEIGHTS_FILE}"
        with open(path, "r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))
        return sent

    config = TransferConfig(backend="disk", folder=str(folder))
    routes = [make_stored_route(config, folder / "no model here") for _ in range(2)]
    return Sides("disk", *routes, damage)


@pytest.fixture(params=["gloo", "object_store", "disk"])
def sides(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    if request.param == "object_store":
        request.getfixturevalue("ray_cluster")
    made = {"gloo": _gloo, "object_store": _object_store, "disk": lambda: _disk(tmp_path / "weights")}[request.param]()
    yield made
    made.sender.close()
    made.receiver.close()


def weights() -> dict[str, Tensor]:
    """Several data types, a tensor larger than a bucket, one that is not contiguous, and what has no bytes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(50, 7, generator=generator),
        "mask": torch.tensor([True, False, True]),
        "transposed": torch.randn(6, 5, generator=generator).t(),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "eighth": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "ids": torch.arange(9),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "last": torch.ones(64, dtype=torch.uint8),
    }


def manifest_of(tensors: dict[str, Tensor], version: int = 3, bucket_bytes: int = 256) -> WeightManifest:
    specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
    return WeightManifest(version=version, tensors=specs, bucket_bytes=bucket_bytes)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(arrived: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
    assert list(arrived) == list(sent)
    for name, tensor in sent.items():
        assert (arrived[name].dtype, arrived[name].shape) == (tensor.dtype, tensor.shape)
        assert _bytes(arrived[name]) == _bytes(tensor)


@pytest.mark.parametrize("bucket_bytes", [64, 256, 1 << 20])
def test_bits_arrive_as_they_were_sent_for_every_data_type_and_split_tensors(sides: Sides, bucket_bytes: int) -> None:
    tensors = weights()

    sent, received = sides.move(manifest_of(tensors, bucket_bytes=bucket_bytes), tensors.items())

    assert_same(received.tensors, tensors)
    assert received.fault is None
    assert received.digests == sent.digests
    assert all(len(digest) == 32 for digest in sent.digests)


def test_digests_are_the_same_on_every_route(sides: Sides, tmp_path: Any) -> None:
    tensors = weights()
    reference = DiskRoute(tmp_path / "other", keep_versions=1).send(manifest_of(tensors), tensors.items())

    sent, _ = sides.move(manifest_of(tensors), tensors.items())

    assert sent.digests == reference.digests


def test_versions_follow_each_other_and_are_freed(sides: Sides) -> None:
    for version in range(4):
        tensors = {"w": torch.full((100,), float(version)), "b": torch.zeros(3)}
        sent, received = sides.move(manifest_of(tensors, version, 64), tensors.items())
        assert_same(received.tensors, tensors)
        assert received.digests == sent.digests
        del received
        sides.sender.release(version)
        sides.sender.release(version)


def test_damaged_bucket_is_named_by_the_verdict_and_not_staged_where_it_is_known(sides: Sides) -> None:
    tensors = weights()
    manifest = manifest_of(tensors)

    sent, received = sides.move(manifest, tensors.items(), damaged=True)

    ack = EngineAck(engine="inference-0", version=3, digests=received.digests)
    verdict = verify(Publication(version=3, engines=["inference-0"]), sent.digests, [ack])
    assert not verdict.ok
    assert "digest differs in 1 of" in verdict.bad_engines["inference-0"]
    if route_kind(sides.name) is RouteKind.STORED:  # type: ignore[arg-type]
        assert received.fault is not None and "arrived with digest" in received.fault
        assert received.tensors == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("half"), r"tensor 3 is 'eighth' .* the manifest says 'half'"),
        (lambda tensors: tensors.pop("last"), r"the first that is missing is 'last'"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), r"'more' came after the last"),
        (lambda tensors: tensors.update(half=torch.zeros(33)), r"'half' float32\[33\], the manifest says"),
    ],
)
def test_sender_refuses_tensors_that_are_not_those_of_the_manifest(sides: Sides, change: Any, message: str) -> None:
    manifest = manifest_of(weights())
    tensors = weights()
    change(tensors)

    if route_kind(sides.name) is RouteKind.COLLECTIVE:  # type: ignore[arg-type]
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(sides.receiver.receive, manifest, (), TIMEOUT_S)
            with pytest.raises(TransferError, match=message):
                sides.sender.send(manifest, tensors.items())
            assert isinstance(arriving.exception(), TransferError), "the receiver is freed, too"
        return
    with pytest.raises(TransferError, match=message):
        sides.sender.send(manifest, tensors.items())


@pytest.mark.parametrize("stored", ["object_store", "disk"])
def test_parcel_of_another_version_or_of_other_tensors_is_refused(
    request: pytest.FixtureRequest, tmp_path: Any, stored: str
) -> None:
    if stored == "object_store":
        request.getfixturevalue("ray_cluster")
    made = _object_store() if stored == "object_store" else _disk(tmp_path / "weights")
    tensors = weights()
    sent = made.sender.send(manifest_of(tensors, version=2), tensors.items())
    fewer = {name: tensor for name, tensor in tensors.items() if name != "half"}

    for other in (manifest_of(tensors, version=3), manifest_of(fewer, version=2)):
        with pytest.raises(TransferError, match="the parcel holds version 2, 10 tensors"):
            made.receiver.receive(other, [sent.parcel], TIMEOUT_S)
    with pytest.raises(TransferError, match="no parcel for a receiver"):
        made.receiver.receive(manifest_of(tensors, version=2), [], TIMEOUT_S)


def test_parcel_is_chosen_by_the_gpu_of_the_receiver() -> None:
    manifest = manifest_of(weights())
    parcels = [
        Parcel(version=3, fingerprint=manifest.fingerprint(), digests=(), device=device, content=None)
        for device in ("gpu-a", "gpu-b")
    ]

    assert parcel_for(manifest, parcels, "gpu-b") is parcels[1]
    with pytest.raises(TransferError, match=r"receiver on gpu-c; .* gpu-a, gpu-b"):
        parcel_for(manifest, parcels, "gpu-c")


def test_old_versions_leave_the_disk_and_no_part_of_one_is_ever_visible(tmp_path: Any) -> None:
    route = DiskRoute(tmp_path, keep_versions=2)
    tensors = {"w": torch.zeros(8)}

    def broken() -> Iterable[tuple[str, Tensor]]:
        yield "w", tensors["w"]
        raise TransferError("the gather failed")

    for version in range(4):
        route.send(manifest_of(tensors, version), tensors.items())
        route.release(version)
    with pytest.raises(TransferError, match="gather failed"):
        route.send(manifest_of(tensors, 4), broken())

    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_00000002", "version_00000003"]
    assert latest_version(tmp_path) == version_folder(tmp_path, 3)


def test_versions_beyond_the_one_of_a_run_that_was_set_back_are_removed(tmp_path: Any) -> None:
    route = DiskRoute(tmp_path, keep_versions=2)
    tensors = {"w": torch.zeros(8)}
    for version in (5, 6, 2):
        route.send(manifest_of(tensors, version), tensors.items())

    route.release(2)

    assert latest_version(tmp_path) == version_folder(tmp_path, 2)


def test_a_version_on_disk_is_a_safetensors_file_that_proves_itself(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    tensors = weights()
    manifest = manifest_of(tensors)
    DiskRoute(tmp_path / "out", keep_versions=1, model_folder=tmp_path / "model").send(manifest, tensors.items())
    folder = version_folder(tmp_path / "out", 3)

    loaded = load_file(folder / WEIGHTS_FILE)

    assert_same({name: loaded[name] for name in tensors}, tensors)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", WEIGHTS_FILE, "weights.json"]
    assert read_weights(folder, manifest).fault is None
    for text in ("{}", "[]", "{"):
        (folder / "weights.json").write_text(text)
        with pytest.raises(TransferError, match="no complete weight version"):
            read_weights(folder, manifest)
    (folder / "weights.json").unlink()
    with pytest.raises(TransferError, match="no complete weight version"):
        read_weights(folder, manifest)


def test_objects_are_freed_once_sender_and_parcel_let_go(ray_cluster: None) -> None:
    import ray

    route = make_stored_route(TransferConfig(backend="object_store"), None)  # type: ignore[arg-type]
    tensors = {f"w{index}": torch.zeros(1 << 16) for index in range(4)}
    sent = route.send(manifest_of(tensors, bucket_bytes=1 << 18), tensors.items())
    stored = {ref.hex().encode() for ref in sent.parcel.content}
    # No public call tells what this process keeps alive.
    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts
    assert len(stored) == 4 and stored <= counts().keys()

    del sent
    assert stored <= counts().keys(), "the sender keeps them until it is told"
    route.release(3)

    assert not stored & counts().keys()


def test_full_object_store_is_a_failed_transfer_that_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import ObjectStoreFullError

    def put(_: object) -> None:
        raise ObjectStoreFullError("no room for 64 bytes")

    monkeypatch.setattr(ray, "put", put)
    route = ObjectStoreRoute()

    with pytest.raises(TransferError, match=r"version 3 cannot be put .*no room for 64 bytes.*--object-store-memory"):
        route.send(manifest_of(weights()), weights().items())

    assert not route._held


def test_limit_of_fetching_holds_for_all_objects_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = [100.0], []

    def fetch(ref: list[Any], *, seconds: float, **_: object) -> list[Any]:
        limits.append(seconds)
        now[0] += 12.0
        return ref

    monkeypatch.setattr(object_store_route, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(object_store_route, "get_within", fetch)
    tensors = {f"w{index}": torch.zeros(4) for index in range(4)}
    manifest = manifest_of(tensors)
    parcel = Parcel.of(manifest, digests=(), content=tuple([tensor.numpy()] for tensor in tensors.values()))

    ObjectStoreRoute().receive(manifest, [parcel], 30.0)

    assert limits == [30.0, 18.0, 6.0, 0.0]


def test_cuda_ipc_is_refused_on_a_machine_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"cuda_ipc needs a GPU .*placement\.mode=colocated"):
        make_stored_route(TransferConfig(backend="cuda_ipc"), None)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that two processes share")
def test_weights_arrive_over_cuda_ipc_in_another_process() -> None:
    from torch.multiprocessing import get_context

    context = get_context("spawn")
    manifests, results = context.Queue(), context.Queue()
    child = context.Process(target=_receive_over_ipc, args=(manifests, results))
    child.start()
    route = make_stored_route(TransferConfig(backend="cuda_ipc"), None)  # type: ignore[arg-type]
    tensors = {name: tensor.cuda() for name, tensor in weights().items()}
    manifest = manifest_of(tensors)

    sent = route.send(manifest, tensors.items())
    manifests.put((manifest, sent.parcel))
    digests, arrived = results.get(timeout=120)

    assert digests == sent.digests
    assert arrived == {name: _bytes(tensor.cpu()) for name, tensor in tensors.items()}
    child.join(timeout=60)
    route.release(3)


def _receive_over_ipc(manifests: Any, results: Any) -> None:
    manifest, parcel = manifests.get(timeout=120)
    received = make_stored_route(TransferConfig(backend="cuda_ipc"), None).receive(manifest, [parcel], TIMEOUT_S)
    results.put((received.digests, {name: _bytes(tensor.cpu()) for name, tensor in received.tensors.items()}))


@pytest.mark.parametrize(
    ("mode", "train_gpus", "engine_gpus"), [("disaggregated", 1, 1), ("colocated", 0, 0), ("colocated", 2, 2)]
)
def test_cuda_ipc_is_refused_by_the_config_unless_pairs_share_a_gpu(
    repo_root: Any, mode: str, train_gpus: int, engine_gpus: int
) -> None:
    overrides = [
        "transfer.backend=cuda_ipc",
        f"placement.mode={mode}",
        f"training.gpus_per_worker={train_gpus}",
        f"inference.gpus_per_engine={engine_gpus}",
    ]

    with pytest.raises(ConfigError, match=rf"cuda_ipc needs an engine on the same GPU .*placement\.mode={mode}"):
        RunConfig.load(repo_root / "configs" / "smollm2_chain_sum.yaml", overrides)


def test_tied_embeddings_are_in_the_manifest_once(tmp_path: Any) -> None:
    spec = TensorSpec(name="embed", shape=(4, 2), dtype="float32")

    with pytest.raises(TransferError, match="names tensors twice: embed"):
        WeightManifest(version=1, tensors=(spec, spec), bucket_bytes=64)
