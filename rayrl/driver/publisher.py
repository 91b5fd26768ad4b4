"""Publish weight versions: acts on the state machine of `infra.publication`.

    prepare   every engine checks the manifest against its model
    transfer  training rank 0 sends buckets, engines stage them; generation goes on with the old weights. Collective
              routes run both at once, stored ones one after the other
    verify    each engine's digests against the trainer's
    commit    every engine pauses, loads, resumes; running requests go on with the new weights

A publication that fails before the commit is aborted: engines forget what they staged and keep the old version, the
transfer group is rebuilt under the next epoch, and the publication is tried once more.
"""

import asyncio
import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrl.config.run import RunConfig
from rayrl.errors import ActorError, DeadlineExceeded, RayrlError, TransferError
from rayrl.infra.actor_group import ActorGroup
from rayrl.infra.placement_plan import transfer_backend
from rayrl.infra.publication import EngineAck, Publication, PublicationState, verify
from rayrl.infra.weight_route import RouteKind, route_kind
from rayrl.utils.logger import get_logger

if TYPE_CHECKING:
    from rayrl.infra.weight_transfer import WeightManifest

_LOGGER = get_logger("driver.publisher")
_ATTEMPTS = 2
TRAINER = "train-0"
"""Name of the sender in transfer groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationRecord:
    """A version that became current."""

    version: int
    digest: str
    """Over the digests of all buckets, the same on the trainer and on every engine."""
    engines: tuple[str, ...]
    """Which acknowledged it."""
    num_bytes: int
    transfer_s: float
    commit_s: float
    """From the first pause to the last resume."""


class Publisher:
    """Moves weights from the training group to all engines, proven before they are used."""

    def __init__(self, *, config: RunConfig, train: ActorGroup, inference: ActorGroup) -> None:
        self._config = config
        self._train = train
        self._inference = inference
        self._epoch = 0
        self._seconds = config.driver.deadlines.publication_s
        self._backend = transfer_backend(config)
        self._kind = route_kind(self._backend)

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines, in rank order of the transfer group."""
        return tuple(member.name for member in self._inference.members)

    async def connect(self) -> None:
        """Build the transfer group under the next epoch: training rank 0, then the engines. Stored routes need none."""
        if self._kind is RouteKind.STORED:
            return
        self._epoch += 1
        seconds = self._seconds
        phase = f"rendezvous of transfer group, epoch {self._epoch}"
        address = await self._train.call(0, "host_transfer_rendezvous", seconds=seconds, phase=phase)
        members = (TRAINER, *self.engines)
        # Ends before the driver's own deadline, so that the error from inside, which names the member, arrives first.
        inner = 0.8 * seconds
        await asyncio.gather(
            self._train.call(
                0, "join_transfer", address, self._epoch, members, self._backend, inner, seconds=seconds, phase=phase
            ),
            self._inference.call_each(
                "join_transfer",
                [(address, self._epoch, rank, members, self._backend, inner) for rank in range(1, len(members))],
                seconds=seconds,
                phase=phase,
            ),
        )

    async def publish(self, version: int) -> PublicationRecord:
        """Make `version` current on every engine. TransferError if it cannot be proven to have arrived."""
        for attempt in range(1, _ATTEMPTS + 1):
            publication = Publication(version=version, engines=self.engines)
            start = time.monotonic()
            try:
                manifest, digests = await self._transfer(publication)
                break
            except (TransferError, DeadlineExceeded) as error:
                if attempt == _ATTEMPTS:
                    raise
                _LOGGER.warning("publication of version %d aborted, trying once more: %s", version, error)
                await self.connect()
        # No second try from here on: some engines may serve the new version already.
        transferred = time.monotonic()
        publication.move(PublicationState.COMMIT)
        await self._inference.call_all(
            "commit", version, seconds=self._seconds, phase=f"publication of version {version}: commit"
        )
        publication.move(PublicationState.DONE)
        await self._release(version)
        return PublicationRecord(
            version=version,
            digest=hashlib.sha256("".join(digests).encode()).hexdigest()[:32],
            engines=self.engines,
            num_bytes=sum(spec.num_bytes for spec in manifest.tensors),
            transfer_s=transferred - start,
            commit_s=time.monotonic() - transferred,
        )

    async def _transfer(self, publication: Publication) -> "tuple[WeightManifest, tuple[str, ...]]":
        """Stage the version on every engine and return manifest and digests; engines forget it where that fails."""
        version, seconds = publication.version, self._seconds
        name = f"publication of version {version}"
        try:
            manifests = await self._train.call_all(
                "weight_manifest", version, seconds=seconds, phase=f"{name}: manifest"
            )
            manifest: WeightManifest = manifests[0]
            await self._inference.call_all("prepare", manifest, seconds=seconds, phase=f"{name}: prepare")
            publication.move(PublicationState.TRANSFER)
            digests, acks = await self._move(manifest, f"{name}: transfer")
            publication.move(PublicationState.VERIFY)
            verdict = verify(publication, digests, acks)
            if not verdict.ok:
                faults = "; ".join(f"{engine}: {reason}" for engine, reason in verdict.bad_engines.items())
                raise TransferError(f"{name} did not arrive as sent: {faults}")
        except RayrlError as error:
            publication.move(PublicationState.ABORTED)
            if not isinstance(error, ActorError):
                await self._inference.call_all("discard", version, seconds=seconds, phase=f"{name}: discard")
                await self._release(version)
            raise
        return manifest, digests

    async def _move(self, manifest: "WeightManifest", phase: str) -> tuple[tuple[str, ...], list[EngineAck]]:
        """Bring the version to all engines; return the digests of the trainer and what each engine acknowledges."""
        seconds, version = self._seconds, manifest.version
        # Inside, waits end before the driver's own deadline: their error names the member.
        inner = 0.8 * seconds
        if self._kind is RouteKind.COLLECTIVE:
            sent, acks = await asyncio.gather(
                self._train.call_all("send_weights", version, seconds=seconds, phase=phase),
                self._inference.call_all("receive", manifest, (), inner, seconds=seconds, phase=phase),
            )
        else:
            sent = await self._train.call_all("send_weights", version, seconds=seconds, phase=phase)
            parcels = tuple(answer.parcel for answer in sent if answer is not None)
            acks = await self._inference.call_all("receive", manifest, parcels, inner, seconds=seconds, phase=phase)
        return sent[0].digests, acks

    async def _release(self, version: int) -> None:
        """Let the sender free what it kept for engines that had yet to fetch."""
        if self._kind is RouteKind.STORED:
            phase = f"publication of version {version}: release"
            await self._train.call_all("release_weights", version, seconds=self._seconds, phase=phase)
