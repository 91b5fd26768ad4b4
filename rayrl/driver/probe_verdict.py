"""Whether engines hold what the trainer holds: pure decisions from checksums and logprobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProbe:
    """What one engine showed.

    Example: `EngineProbe(engine="inference-0", version=3, checksums={"model.norm.weight": "9f3c"}, tokens=(17, 4),
    logprobs=(-0.1, -2.0), scores=(-0.1, -2.1))`.
    """

    engine: str
    version: int | None
    """Version that sampled the probe's tokens; None if it was more than one."""
    checksums: Mapping[str, str]
    """Of the weights that the engine can say."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the tokens, as the engine sampled them."""
    scores: tuple[float, ...]
    """Of the same tokens, by the trainer."""

    @property
    def logprob_diff(self) -> float:
        """Mean absolute difference over the tokens, in nats; 0 if there are none."""
        pairs = list(zip(self.logprobs, self.scores, strict=True))
        return sum(abs(mine - theirs) for mine, theirs in pairs) / max(len(pairs), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeVerdict:
    """What a check found.

    Example: `ProbeVerdict(version=3, bad_engines={}, alarms={}, logprob_diff=0.2, num_checksums=272)`.
    """

    version: int
    bad_engines: Mapping[str, str]
    """Reason by name of the engines that hold other weights, or another version, or could not be asked."""
    alarms: Mapping[str, str]
    """Reason by name of the engines whose logprobs are too far from the trainer's."""
    logprob_diff: float
    """The largest mean difference of an engine, in nats."""
    num_checksums: int
    """Weights of all engines together whose checksums were compared."""

    @property
    def metrics(self) -> dict[str, float]:
        """What the run logs."""
        return {
            "probe/logprob_diff": self.logprob_diff,
            "probe/compared_weights": float(self.num_checksums),
            "probe/bad_engines": float(len(self.bad_engines)),
        }


def judge(
    version: int,
    trainer_checksums: Mapping[str, str],
    probes: Sequence[EngineProbe],
    *,
    tolerance: float,
    unanswered: Mapping[str, str],
) -> ProbeVerdict:
    """Compare what engines showed with the trainer.

    An engine is bad if a checksum differs, if it sampled with another version, or if it did not answer
    (`unanswered`, with the reason). Logprobs that differ raise an alarm only: rounding and kernels move them, too.
    """
    bad = dict(unanswered)
    alarms: dict[str, str] = {}
    for probe in probes:
        wrong = _wrong_weights(version, trainer_checksums, probe)
        if wrong is not None:
            bad[probe.engine] = wrong
        if probe.logprob_diff > tolerance:
            alarms[probe.engine] = (
                f"mean logprob difference of version {version} to the trainer is {probe.logprob_diff:.4g} nats over "
                f"{len(probe.tokens)} tokens, transfer.probe_tolerance={tolerance:g}"
            )
    return ProbeVerdict(
        version=version,
        bad_engines=bad,
        alarms=alarms,
        logprob_diff=max((probe.logprob_diff for probe in probes), default=0.0),
        num_checksums=sum(len(probe.checksums) for probe in probes),
    )


def _wrong_weights(version: int, trainer: Mapping[str, str], probe: EngineProbe) -> str | None:
    differ = [name for name, checksum in probe.checksums.items() if trainer.get(name) != checksum]
    if differ:
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        return f"after version {version} it holds other values of {differ[0]}{more} than the trainer"
    if probe.version != version:
        return f"it samples with version {probe.version}, published is {version}"
    return None
