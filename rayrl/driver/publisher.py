"""Publish weight versions: acts on the state machine of `infra.publication`.

    prepare   every engine checks the manifest against its model
    transfer  training rank 0 broadcasts buckets, engines stage them; generation goes on with the old weights
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
from rayrl.infra.publication import Publication, PublicationState, verify
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

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines, in rank order of the transfer group."""
        return tuple(member.name for member in self._inference.members)

    async def connect(self) -> None:
        """Build the transfer group under the next epoch: training rank 0, then the engines."""
        self._epoch += 1
        seconds = self._seconds
        phase = f"rendezvous of transfer group, epoch {self._epoch}"
        address = await self._train.call(0, "host_transfer_rendezvous", seconds=seconds, phase=phase)
        backend = transfer_backend(self._config)
        members = (TRAINER, *self.engines)
        # Ends before the driver's own deadline, so that the error from inside, which names the member, arrives first.
        inner = 0.8 * seconds
        await asyncio.gather(
            self._train.call(
                0, "join_transfer", address, self._epoch, members, backend, inner, seconds=seconds, phase=phase
            ),
            self._inference.call_each(
                "join_transfer",
                [(address, self._epoch, rank, members, backend, inner) for rank in range(1, len(members))],
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
            sent, acks = await asyncio.gather(
                self._train.call_all("send_weights", version, seconds=seconds, phase=f"{name}: transfer"),
                self._inference.call_all("receive", manifest, seconds=seconds, phase=f"{name}: transfer"),
            )
            publication.move(PublicationState.VERIFY)
            verdict = verify(publication, sent[0], acks)
            if not verdict.ok:
                faults = "; ".join(f"{engine}: {reason}" for engine, reason in verdict.bad_engines.items())
                raise TransferError(f"{name} did not arrive as sent: {faults}")
        except RayrlError as error:
            publication.move(PublicationState.ABORTED)
            if not isinstance(error, ActorError):
                await self._inference.call_all("discard", version, seconds=seconds, phase=f"{name}: discard")
            raise
        return manifest, tuple(sent[0])
