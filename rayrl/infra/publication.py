"""The phases of publishing one weight version to the inference engines. Pure decisions; the driver acts on them.

    PREPARE ──> TRANSFER ──> VERIFY ──> COMMIT ──> DONE
       └───────────┴────────────┴──> ABORTED

The version becomes current only in COMMIT, after every engine has acknowledged it with the digests of the sender.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from rayrl.errors import IllegalTransition

TRANSFER_GROUP = "weights"
"""Name of the collective group that weights travel over: the trainer's rank 0, then the engines."""


class PublicationState(Enum):
    """Where a publication stands."""

    PREPARE = "the collective group is checked and the manifest is handed to every member"
    TRANSFER = "the trainer broadcasts, the engines stage what arrives beside the weights in use"
    VERIFY = "the digests of the engines are compared with those of the trainer"
    COMMIT = "every engine switches to the staged weights; there is no way back"
    DONE = "the version is current"
    ABORTED = "the staged weights are thrown away and the version before stays current"


_MOVES: Mapping[PublicationState, tuple[PublicationState, ...]] = {
    PublicationState.PREPARE: (PublicationState.TRANSFER, PublicationState.ABORTED),
    PublicationState.TRANSFER: (PublicationState.VERIFY, PublicationState.ABORTED),
    PublicationState.VERIFY: (PublicationState.COMMIT, PublicationState.ABORTED),
    # Some engines may serve the new version already: one that fails here is replaced, the others stay.
    PublicationState.COMMIT: (PublicationState.DONE,),
    PublicationState.DONE: (),
    PublicationState.ABORTED: (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAck:
    """What one engine says it received.

    Example: `EngineAck(engine="inference-0", version=3, digests=("9f3c", "02aa"))`.
    """

    engine: str
    """Name of the engine."""
    version: int
    """Version that it staged."""
    digests: tuple[str, ...]
    """Digest of each bucket, computed on the bytes that arrived."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what they were spent on; some pass at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a version may be committed, and which engines stand in the way."""

    ok: bool
    """True if every engine acknowledged the version with the right digests."""
    bad_engines: Mapping[str, str]
    """Reason by engine name; these are to be quarantined and replaced."""


class Publication:
    """One weight version on its way to the engines."""

    def __init__(self, version: int, engines: Sequence[str]) -> None:
        self.version = version
        self.engines = tuple(engines)
        self._state = PublicationState.PREPARE

    @property
    def state(self) -> PublicationState:
        """Where it stands."""
        return self._state

    def move(self, state: PublicationState) -> None:
        """Go to the next state. IllegalTransition if there is no such move."""
        allowed = _MOVES[self._state]
        if state not in allowed:
            names = ", ".join(option.name for option in allowed) or "none, it is over"
            raise IllegalTransition(
                f"publication of version {self.version} is in {self._state.name} and cannot move to {state.name}; "
                f"allowed: {names}"
            )
        self._state = state


def verify(publication: Publication, trainer_digests: Sequence[str], acks: Iterable[EngineAck]) -> Verdict:
    """Compare what the engines acknowledge with what the trainer sent.

    An engine is bad if it did not answer, staged another version, has another number of buckets, or a bucket whose
    digest differs. Answers of engines that take no part are ignored.
    """
    by_engine: dict[str, list[EngineAck]] = {engine: [] for engine in publication.engines}
    for ack in acks:
        if ack.engine in by_engine:
            by_engine[ack.engine].append(ack)
    bad: dict[str, str] = {}
    for engine, answers in by_engine.items():
        reasons = [_fault(publication.version, tuple(trainer_digests), ack) for ack in answers]
        faults = [reason for reason in reasons or ["did not acknowledge"] if reason is not None]
        if faults:
            bad[engine] = f"version {publication.version}: {faults[0]}"
    return Verdict(ok=not bad, bad_engines=bad)


def _fault(version: int, sent: tuple[str, ...], ack: EngineAck) -> str | None:
    if ack.version != version:
        return f"staged version {ack.version} instead"
    if len(ack.digests) != len(sent):
        return f"received {len(ack.digests)} buckets of {len(sent)}"
    different = [index for index, (a, b) in enumerate(zip(sent, ack.digests, strict=True)) if a != b]
    if different:
        first = different[0]
        return (
            f"digest differs in {len(different)} of {len(sent)} buckets, first in bucket {first}: "
            f"sent {sent[first]}, received {ack.digests[first]}"
        )
    return None
