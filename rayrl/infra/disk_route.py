"""Weights through a folder that all engines see, also engines outside the cluster.

    FOLDER/version_00000003/model.safetensors     all weights
                            weights.json          version and digests, read and checked by `read_weights`
                            config.json, ...      copied from the model folder: any engine can load the version

A version is written under a hidden name, flushed and renamed: it is complete or not there. The newest
`transfer.keep_versions` stay; older ones are removed once the next has been committed.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rayrl.errors import TransferError
from rayrl.infra.bucket_stream import digests_of_tensors
from rayrl.infra.phase_times import PhaseTimes
from rayrl.infra.safetensors_file import SafetensorsWriter
from rayrl.infra.weight_manifest import WeightManifest, bytes_of, checked_tensors, spec_of
from rayrl.infra.weight_route import Parcel, ReceivedWeights, SentWeights, digest_fault, parcel_for
from rayrl.utils.atomic_file import sync_folder

WEIGHTS_FILE = "model.safetensors"
RECORD_FILE = "weights.json"
_PREFIX = "version_"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")


class DiskRoute:
    """Implements `WeightRoute`."""

    def __init__(self, folder: Path, *, keep_versions: int, model_folder: Path | None = None) -> None:
        """`model_folder` is where config and tokenizer are copied from; without it a version has weights alone."""
        self._folder = folder
        self._keep = keep_versions
        self._model_folder = model_folder

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> SentWeights:
        """See `WeightRoute`."""
        times = PhaseTimes()
        target = version_folder(self._folder, manifest.version)
        hidden = target.with_name(f".{target.name}.tmp")
        # One trainer writes here: what is left under this name is of one that died.
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            hidden.mkdir(parents=True)
            self._copy_model_files(hidden)
            digests = _write(hidden / WEIGHTS_FILE, manifest, checked_tensors(manifest, tensors), times)
            record = {"version": manifest.version, "manifest": manifest.fingerprint(), "digests": digests}
            (hidden / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            with times.of("flush"):
                _sync(hidden)
            # The second try of a publication, or a run that was set back: the version is written again.
            shutil.rmtree(target, ignore_errors=True)
            hidden.rename(target)
            sync_folder(self._folder)
        except OSError as error:
            raise TransferError(
                f"version {manifest.version} cannot be written to transfer.folder={str(self._folder)!r}: {error}"
            ) from error
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        parcel = Parcel.of(manifest, digests=digests, content=str(target))
        return SentWeights(digests=digests, parcel=parcel, times=times.seconds)

    def receive(
        self,
        manifest: WeightManifest,
        parcels: Sequence[Parcel],
        timeout_s: float,
        memory: Tensor | None = None,
    ) -> ReceivedWeights:
        """See `WeightRoute`."""
        parcel = parcel_for(manifest, parcels)
        return read_weights(Path(parcel.content), manifest, sent=parcel.digests)

    def release(self, version: int) -> None:
        """Remove what is older than the versions to keep, and what a run that was set back left behind."""
        newer = [path for path in _versions(self._folder) if _number(path) > version]
        older = [path for path in _versions(self._folder) if _number(path) <= version]
        for path in (*newer, *older[: -self._keep]):
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Nothing is held; the newest versions stay."""

    def _copy_model_files(self, target: Path) -> None:
        if self._model_folder is None:
            return
        for pattern in _COPIED:
            for file in sorted(self._model_folder.glob(pattern)):
                if not file.match("*.index.json"):
                    shutil.copy(file, target / file.name)


def version_folder(folder: Path, version: int) -> Path:
    """Return where a version lies."""
    return folder / f"{_PREFIX}{version:08d}"


def latest_version(folder: Path) -> Path | None:
    """Return the newest version of a folder, for engines that follow a run from outside; None if there is none."""
    versions = _versions(folder)
    return versions[-1] if versions else None


def read_weights(path: Path, manifest: WeightManifest, sent: Sequence[str] | None = None) -> ReceivedWeights:
    """Return the tensors of one version as views of its file, with the digests of what is there.

    Args:
        path: folder of the version.
        manifest: what it must consist of.
        sent: digests to compare with; those of the folder's own record when empty.

    Raises:
        TransferError: the folder is incomplete, or of another version, or holds other tensors.
    """
    record = _record(path)
    if record["manifest"] != manifest.fingerprint():
        raise TransferError(f"{path}: it holds {record['manifest']}, expected was {manifest.fingerprint()}")
    try:
        with safe_open(path / WEIGHTS_FILE, "pt") as file:
            tensors = {spec.name: file.get_tensor(spec.name) for spec in manifest.tensors}
    except (OSError, SafetensorError) as error:
        raise TransferError(f"{path / WEIGHTS_FILE} cannot be read as version {manifest.version}: {error}") from error
    for spec in manifest.tensors:
        if spec_of(spec.name, tensors[spec.name]) != spec:
            raise TransferError(f"{path / WEIGHTS_FILE}: {spec.name!r} is not what the manifest says")
    times = PhaseTimes()
    arrived = digests_of_tensors(manifest, tensors.values(), times)
    fault = digest_fault(sent if sent is not None else record["digests"], arrived)
    return ReceivedWeights(
        tensors={} if fault is not None else tensors, digests=arrived, fault=fault, times=times.seconds
    )


def _write(path: Path, manifest: WeightManifest, tensors: Iterator[Tensor], times: PhaseTimes) -> tuple[str, ...]:
    """Write the tensors and return the digest of each bucket; a tensor is digested while it is written."""
    writer = SafetensorsWriter(path, manifest.tensors)
    with ThreadPoolExecutor(1, thread_name_prefix="disk") as pool:

        def written() -> Iterator[Tensor]:
            for index, tensor in enumerate(tensors):
                with times.of("gather"):
                    flat = bytes_of(tensor).cpu()
                done: Future[None] = pool.submit(writer.write, index, flat)
                yield flat
                with times.of("write"):
                    done.result()

        try:
            return digests_of_tensors(manifest, written(), times)
        finally:
            writer.close()


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
        return {key: record[key] for key in ("manifest", "digests")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TransferError(f"{path} is no complete weight version: {type(error).__name__}: {error}") from error


def _versions(folder: Path) -> list[Path]:
    """Return the complete versions, oldest first."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))
