"""Publish weight versions: acts on the state machine of `infra.publication`.

    join      training rank 0 and the engines meet under the next epoch, if the members are others than last time
    prepare   every engine checks the manifest against its model
    transfer  training rank 0 sends buckets, engines stage them; generation goes on with the old weights. Collective
              routes run both at once, stored ones, which need no group to join, one after the other
    verify    each engine's digests against the trainer's
    commit    every engine pauses, loads, resumes; running requests go on with the new weights

An engine that dies, refuses or acknowledges other digests is quarantined: killed, and reported to the supervisor, which
starts another one. Before the commit that costs the attempt: the others forget what they staged, keep the old version,
and get the new one at the next try, under the next epoch. At the commit those that have it keep it.

    waits for                      unblocked by                      bounded by
    the lock                       the end of a step or of a push    the deadlines of what goes on inside
    an engine, when none is left   the supervisor's replacement      `engine_wait_s`
    each phase                     trainer and engines               deadlines.publication_s
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rayrl.checkpoint.ledger import PublishedVersion
from rayrl.config.run import RunConfig
from rayrl.driver.failure_policy import FaultCause
from rayrl.driver.publication_faults import Aborted, check_outcomes, error_of, fault_of, is_refusal
from rayrl.errors import ActorDied, DeadlineExceeded, RayrlError, TransferError
from rayrl.inference.engine import LoadTimes
from rayrl.infra.actor_group import ActorGroup
from rayrl.infra.outcomes import CallOutcome, CallState, PendingCall, gather_outcomes
from rayrl.infra.placement_plan import transfer_backend
from rayrl.infra.publication import TRANSFER_GROUP, EngineAck, Publication, PublicationState, verify
from rayrl.infra.weight_route import RouteKind, route_kind
from rayrl.utils.logger import get_logger

if TYPE_CHECKING:
    from rayrl.infra.weight_route import SentWeights
    from rayrl.infra.weight_transfer import WeightManifest

_LOGGER = get_logger("driver.publisher")
_FRUITLESS_ATTEMPTS = 2
"""Attempts that fail without an engine to blame, after which the publication fails."""
_GRACE_S = 5.0
"""For the others to fail in their turn, once one has failed."""
TRAINER = "train-0"
"""Name of the sender in transfer groups."""

FaultHandler = Callable[[str, FaultCause, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationRecord:
    """A version that became current."""

    version: int
    digest: str
    """Over the digests of all buckets, as the trainer sent them."""
    acknowledged: Mapping[str, str]
    """The same by engine, over what arrived there; of those that use the version."""
    num_bytes: int
    transfer_s: float
    commit_s: float
    """From the first call to the last answer."""
    load_s: float = 0.0
    """Of the slowest engine, putting the weights into its model."""
    pause_s: float = 0.0
    """Of the slowest engine, sampling nothing."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of single phases: `prepare`, `send_...` of the trainer, `receive_...` of the slowest engine."""
    missing: tuple[str, ...] = ()
    """Engines that took part and failed; they are replaced."""

    @property
    def engines(self) -> tuple[str, ...]:
        """Which use it."""
        return tuple(self.acknowledged)

    @property
    def published(self) -> PublishedVersion:
        """What the ledger keeps of it."""
        return PublishedVersion(
            version=self.version, sent=self.digest, acknowledged=self.acknowledged, missing=self.missing
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """A transfer that ended: not verified yet."""

    digests: tuple[str, ...]
    """Of the trainer."""
    acks: tuple[EngineAck, ...]
    phases: Mapping[str, float]
    """See `PublicationRecord.phases`."""

    @classmethod
    def of(cls, sent: "SentWeights", acks: Sequence[EngineAck]) -> "_Moved":
        phases = {f"send_{name}": seconds for name, seconds in sent.times.items()}
        for ack in acks:
            for name, seconds in ack.times.items():
                phases[f"receive_{name}"] = max(phases.get(f"receive_{name}", 0.0), seconds)
        return cls(digests=sent.digests, acks=tuple(acks), phases=phases)


class Publisher:
    """Moves weights from the training group to all engines, proven before they are used."""

    def __init__(self, *, config: RunConfig, train: ActorGroup, inference: ActorGroup) -> None:
        self._config = config
        self._train = train
        self._inference = inference
        self._epoch = 0
        self._joined: tuple[str, ...] = ()
        self._address: Any = None
        self._seconds = config.driver.deadlines.publication_s
        self._backend = transfer_backend(config)
        self._is_collective = route_kind(self._backend) is RouteKind.COLLECTIVE
        self._serving: dict[str, int] = {}
        self.version: int | None = None
        """The version that was published last; None before the first."""
        self.lock = asyncio.Lock()
        """Held over a training step with its publication, over a push to an engine that joins, and over whatever else
        changes the trainer's weights: inside, they are those of `version` or about to become the next one."""
        self.on_fault: FaultHandler = _log_fault
        """Told which engine was quarantined, and why; it is out of the group by then."""

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of all engines, those that have no weights yet included."""
        return tuple(member.name for member in self._inference.members)

    @property
    def serving(self) -> dict[str, Any]:
        """Handles of the engines that have the current version, by name."""
        return {
            member.name: member.handle
            for member in self._inference.members
            if self.version is not None and self._serving.get(member.name) == self.version
        }

    @property
    def engine_wait_s(self) -> float:
        """Longest wait for an engine when none is left: one is noticed, paused for, and started."""
        supervision = self._config.supervision
        return supervision.silence_s + supervision.max_backoff_s + self._config.driver.deadlines.start_s

    def renew_trainer(self, train: ActorGroup) -> None:
        """Send from another training group from now on; hold the lock."""
        self._train = train
        self._joined, self._address = (), None

    def forget_group(self) -> None:
        """Make the next publication build the transfer group anew, under the next epoch."""
        self._joined = ()

    async def publish(self, version: int) -> PublicationRecord:
        """Make `version` current on every engine, those that joined meanwhile included; hold the lock.

        Returns once at least one engine uses it; engines that failed are quarantined.

        Raises:
            ActorError, EngineError: the trainer failed.
            TransferError: attempts failed without an engine to blame.
            DeadlineExceeded: the trainer did not answer, or no engine was left and none came.
        """
        missing: list[str] = []
        fruitless = 0
        while True:
            deadline = asyncio.get_running_loop().time() + self.engine_wait_s
            await self._inference.wait_member(deadline, phase=f"publication of version {version}")
            try:
                record = await self._attempt(version, self.engines)
            except Aborted as aborted:
                missing += aborted.culprits
                fruitless += not aborted.culprits
                if aborted.is_fatal or fruitless == _FRUITLESS_ATTEMPTS:
                    raise aborted.error from None
                _LOGGER.warning("publication of version %d aborted, trying again: %s", version, aborted.error)
                continue
            missing += record.missing
            if record.engines:
                self.version = version
                return replace(record, missing=tuple(dict.fromkeys(missing)))

    async def bring_up(self) -> PublicationRecord | None:
        """Give the current version to the engines that do not have it; None if there are none by then.

        Waits for the lock: a publication that ends meanwhile has given it to them already. Engines that fail are
        quarantined. Raises as `publish` for faults of the trainer.
        """
        async with self.lock:
            version = self.version
            assert version is not None, "engines are brought up after the first publication only"
            fruitless = 0
            while True:
                newcomers = [name for name in self.engines if self._serving.get(name) != version]
                if not newcomers:
                    return None
                try:
                    record = await self._attempt(version, newcomers)
                except Aborted as aborted:
                    fruitless += not aborted.culprits
                    if aborted.is_fatal or fruitless == _FRUITLESS_ATTEMPTS:
                        raise aborted.error from None
                    _LOGGER.warning("push of version %d aborted, trying again: %s", version, aborted.error)
                    continue
                if record.engines:
                    return record

    def quarantine_wrong(self, reasons: Mapping[str, str]) -> None:
        """Take engines out that were found to hold other weights than the trainer; reasons by name."""
        known = {name: reason for name, reason in reasons.items() if self._inference.find(name) is not None}
        self._quarantine({name: (FaultCause.WRONG_WEIGHTS, reason) for name, reason in known.items()})

    async def _attempt(self, version: int, engines: Sequence[str]) -> PublicationRecord:
        """Bring a version to these engines. `Aborted` if it fails before the commit."""
        publication = Publication(version=version, engines=engines)
        start = time.monotonic()
        try:
            manifest, moved = await self._transfer(publication)
        except Aborted as aborted:
            publication.move(PublicationState.ABORTED)
            await self._clean_up(version, engines, aborted.culprits)
            if not aborted.is_fatal:
                await self._release(version)
            raise
        transferred = time.monotonic()
        publication.move(PublicationState.COMMIT)
        outcomes = await self._ask(engines, "commit", version, phase=f"publication of version {version}: commit")
        failed = {outcome.member: fault_of(outcome) for outcome in outcomes if outcome.state is not CallState.DONE}
        if len(failed) == len(outcomes) and self.version is None and all(map(is_refusal, outcomes)):
            # Nothing was ever served: this is a fault of the set-up, which new engines would only repeat.
            raise Aborted(error_of(outcomes[0]), {}, is_fatal=True)
        committed_at = time.monotonic()
        times: list[LoadTimes] = [item.value for item in outcomes if item.state is CallState.DONE]
        self._quarantine(failed)
        publication.move(PublicationState.DONE)
        await self._release(version)
        committed = tuple(name for name in engines if name not in failed)
        self._serving |= dict.fromkeys(committed, version)
        return PublicationRecord(
            version=version,
            digest=_whole(moved.digests),
            acknowledged={ack.engine: _whole(ack.digests) for ack in moved.acks if ack.engine in committed},
            num_bytes=sum(spec.num_bytes for spec in manifest.tensors),
            transfer_s=transferred - start,
            commit_s=committed_at - transferred,
            load_s=max((item.load_s for item in times), default=0.0),
            pause_s=max((item.pause_s for item in times), default=0.0),
            phases=moved.phases,
            missing=tuple(failed),
        )

    async def _transfer(self, publication: Publication) -> "tuple[WeightManifest, _Moved]":
        """Stage the version on every engine; return the manifest, the digests of what was sent and of what arrived, and
        the times. `Aborted` where that fails."""
        version, engines = publication.version, publication.engines
        name = f"publication of version {version}"
        if self._is_collective and self._joined != tuple(engines):
            await self._connect(engines)
        try:
            manifests = await self._train.call_all(
                "weight_manifest", version, seconds=self._seconds, phase=f"{name}: manifest"
            )
        except RayrlError as error:
            raise Aborted(error, {}, is_fatal=True) from error
        manifest: WeightManifest = manifests[0]
        start = time.monotonic()
        outcomes = await self._ask(engines, "prepare", manifest, phase=f"{name}: prepare")
        check_outcomes(outcomes, sender=self._train.name, is_first=self.version is None)
        publication.move(PublicationState.TRANSFER)
        prepared = time.monotonic() - start
        moved = await self._move(manifest, engines, f"{name}: transfer")
        publication.move(PublicationState.VERIFY)
        verdict = verify(publication, moved.digests, moved.acks)
        if not verdict.ok:
            faults = "; ".join(f"{engine}: {reason}" for engine, reason in verdict.bad_engines.items())
            raise Aborted(
                TransferError(f"{name} did not arrive as sent: {faults}"),
                {engine: (FaultCause.WRONG_WEIGHTS, reason) for engine, reason in verdict.bad_engines.items()},
                is_fatal=False,
            )
        return manifest, replace(moved, phases={"prepare": prepared, **moved.phases})

    async def _move(self, manifest: "WeightManifest", engines: Sequence[str], phase: str) -> "_Moved":
        """Bring the version to these engines; return the digests of the trainer and what each engine acknowledges."""
        version, sender = manifest.version, self._train.name
        # Inside, waits end before the driver's own deadline: their error names the member.
        inner = 0.8 * self._seconds
        check_outcomes(self._gone(engines, phase), sender=sender)
        calls = self._train.submit("send_weights", version)
        if self._is_collective:
            calls += self._inference.submit("receive", manifest, (), inner, names=engines)
            outcomes = await self._gather(calls, phase, is_collective=True)
            check_outcomes(outcomes, sender=sender, is_collective=True)
        else:
            outcomes = await self._gather(calls, phase)
            check_outcomes(outcomes, sender=sender)
            parcels = tuple(item.value.parcel for item in outcomes if item.value is not None)
            received = await self._ask(engines, "receive", manifest, parcels, inner, phase=phase)
            check_outcomes(received, sender=sender)
            outcomes += received
        return _Moved.of(outcomes[0].value, [item.value for item in outcomes if item.member in engines])

    async def _release(self, version: int) -> None:
        """Let the sender free what it kept for engines that had yet to fetch."""
        if not self._is_collective:
            phase = f"publication of version {version}: release"
            await self._train.call_all("release_weights", version, seconds=self._seconds, phase=phase)

    async def _connect(self, engines: Sequence[str]) -> None:
        """Build the transfer group under the next epoch: training rank 0, then the engines."""
        self._epoch += 1
        self._joined = ()
        epoch, seconds = self._epoch, self._seconds
        phase = f"rendezvous of transfer group, epoch {epoch}"
        try:
            self._address = await self._train.call(0, "host_transfer_rendezvous", seconds=seconds, phase=phase)
        except RayrlError as error:
            raise Aborted(error, {}, is_fatal=True) from error
        members = (TRAINER, *engines)
        # Ends before the driver's own deadline, so that the error from inside, which names the member, arrives first.
        inner = 0.8 * seconds
        calls = self._train.submit(
            "join_transfer", self._address, epoch, members, self._backend, inner, names=[TRAINER]
        )
        for rank, engine in enumerate(engines, 1):
            calls += self._inference.submit(
                "join_transfer", self._address, epoch, rank, members, self._backend, inner, names=[engine]
            )
        outcomes = await self._gather(calls, phase, is_collective=True)
        check_outcomes(outcomes, sender=self._train.name, is_collective=True)
        self._joined = tuple(engines)

    async def _ask(self, engines: Collection[str], method: str, *args: Any, phase: str) -> list[CallOutcome]:
        """Call these engines; one that is gone by now has an outcome, too."""
        gone = self._gone(engines, phase)
        return gone + await self._gather(self._inference.submit(method, *args, names=engines), phase)

    def _gone(self, engines: Collection[str], phase: str) -> list[CallOutcome]:
        """Return the outcomes of engines that the supervisor has removed meanwhile."""
        return [
            CallOutcome(member=name, state=CallState.DIED, error=ActorDied(f"{phase}: {name} is gone"))
            for name in engines
            if self._inference.find(name) is None
        ]

    async def _gather(
        self, calls: Sequence[PendingCall], phase: str, *, is_collective: bool = False
    ) -> list[CallOutcome]:
        """Return the outcomes of calls; in a collective the failure of one ends those of the others."""
        return await gather_outcomes(
            calls,
            seconds=self._seconds,
            grace_s=_GRACE_S if is_collective else self._seconds,
            phase=phase,
            on_failure=self._end_epoch if is_collective else None,
        )

    async def _end_epoch(self) -> None:
        """Free whoever waits, in the rendezvous, for a member that has failed."""
        self._joined = ()
        if self._address is None:
            return
        from rayrl.infra.collective_group import end_epoch

        try:
            await asyncio.to_thread(
                end_epoch,
                self._address,
                name=TRANSFER_GROUP,
                epoch=self._epoch,
                reason="a member has failed",
                timeout_s=_GRACE_S,
            )
        except DeadlineExceeded as error:
            _LOGGER.warning("members that wait for a failed one end by their own deadlines: %s", error)

    async def _clean_up(
        self, version: int, engines: Sequence[str], culprits: Mapping[str, tuple[FaultCause, str]]
    ) -> None:
        """Quarantine the culprits and let the others forget what they staged."""
        self.forget_group()
        self._quarantine(culprits)
        left = [name for name in engines if self._inference.find(name) is not None]
        outcomes = await self._ask(left, "discard", version, phase=f"publication of version {version}: discard")
        self._quarantine({item.member: fault_of(item) for item in outcomes if item.state is not CallState.DONE})

    def _quarantine(self, faults: Mapping[str, tuple[FaultCause, str]]) -> None:
        for name, (cause, reason) in faults.items():
            self._serving.pop(name, None)
            self.forget_group()
            self._inference.remove(name)
            self.on_fault(name, cause, reason)


def _whole(digests: Sequence[str]) -> str:
    """Return one digest over those of all buckets."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def _log_fault(name: str, cause: FaultCause, reason: str) -> None:
    _LOGGER.warning("engine %s is quarantined (%s): %s", name, cause.value, reason)
