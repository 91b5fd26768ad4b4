"""Look, after a publication, at what the engines really hold: a transfer that was proven may still be loaded wrongly.

    trainer: checksums of all weights ──────────────┐
    engines: checksums of those they can say ───────┤
    engines: sample the probe's prompt ──tokens──┐  ├──> judge ──> metrics, alarm, bad engines
    trainer: scores the same tokens <────────────┘──┘

Runs under the lock of the publisher: nothing trains or publishes meanwhile. Every wait has
`driver.deadlines.publication_s`.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rayrl.checkpoint.ledger import Ledger
from rayrl.config.run import RunConfig
from rayrl.driver.probe_verdict import EngineProbe, ProbeVerdict, judge
from rayrl.driver.publisher import Publisher
from rayrl.errors import RayrlError
from rayrl.infra.actor_group import ActorGroup, Member
from rayrl.infra.waiting import wait_for
from rayrl.models.folder import check_model_folder
from rayrl.types.sampling import Completion, GenerationRequest, SamplingParams
from rayrl.utils.logger import get_logger

if TYPE_CHECKING:
    from rayrl.infra.weight_manifest import WeightManifest

_LOGGER = get_logger("driver.probe")
_PROMPT_TOKENS = 8
_NEW_TOKENS = 24
_SEED = 20_240_229


class WeightProbe:
    """Checks the engines of a run at start, after each resume, and every `transfer.probe_every` versions."""

    def __init__(
        self,
        *,
        config: RunConfig,
        train: ActorGroup,
        inference: ActorGroup,
        publisher: Publisher,
        ledger: Ledger,
    ) -> None:
        self.train = train
        self._inference = inference
        self._publisher = publisher
        self._every = 0 if config.inference.engine.type == "scripted" else config.transfer.probe_every
        self._tolerance = config.transfer.probe_tolerance
        self._temperature = config.rollout.sampling.temperature
        self._seconds = config.driver.deadlines.publication_s
        self._ledger = ledger
        self._last: int | None = None
        self._prompt = probe_prompt(check_model_folder(config.model.path).vocab_size)
        self._num_probes = 0

    def is_due(self, version: int) -> bool:
        """Return whether this version is to be checked; the first one of a process always is."""
        return self._every > 0 and (self._last is None or abs(version - self._last) >= self._every)

    async def check_if_due(self, version: int, *, step: int) -> Mapping[str, float]:
        """Check where that is due, quarantine bad engines, and return the metrics; none where it is not."""
        if not self.is_due(version):
            return {}
        verdict = await self.check(version, step=step)
        if verdict.bad_engines:
            self._publisher.quarantine_wrong(verdict.bad_engines)
        return verdict.metrics

    async def check(self, version: int, *, step: int) -> ProbeVerdict:
        """Compare the engines that serve `version` with the trainer, which is at it, too; record what differs.

        Raises what the trainer raises; an engine that fails is named in the verdict.
        """
        train, serving = self.train, self._publisher.serving
        phase = f"probe of version {version}"
        self._last = version
        manifests = await train.call_all("weight_manifest", version, seconds=self._seconds, phase=phase)
        checksums = await train.call_all("weight_checksums", seconds=self._seconds, phase=phase)
        # Others are on their way to this version.
        members = [member for member in self._inference.members if member.name in serving]
        asked = [self._ask(member, manifests[0], self._request(), phase) for member in members]
        answers: list[tuple[dict[str, str], Completion] | RayrlError] = await asyncio.gather(*asked)
        found = {m.name: item for m, item in zip(members, answers, strict=True) if not isinstance(item, RayrlError)}
        unanswered = {
            m.name: str(item) for m, item in zip(members, answers, strict=True) if isinstance(item, RayrlError)
        }
        completions = [completion.tokens for _, completion in found.values()]
        scores: list[list[list[float]]] = [[]]
        if completions:
            scores = await train.call_all("score_probe", self._prompt, completions, seconds=self._seconds, phase=phase)
        probes = [
            EngineProbe(
                engine=name,
                version=completion.spans[0].version if len(completion.spans) == 1 else None,
                checksums=sums,
                tokens=completion.tokens,
                logprobs=completion.logprobs,
                scores=tuple(row),
            )
            for (name, (sums, completion)), row in zip(found.items(), scores[0], strict=True)
        ]
        verdict = judge(version, checksums[0], probes, tolerance=self._tolerance, unanswered=unanswered)
        self._record(verdict, step)
        return verdict

    def _request(self) -> GenerationRequest:
        """Return a request at the temperature of the rollouts: it is their logprobs that training relies on."""
        self._num_probes += 1
        params = SamplingParams(max_new_tokens=_NEW_TOKENS, temperature=self._temperature, seed=_SEED)
        return GenerationRequest(request_id=f"probe-{self._num_probes}", prompt_tokens=self._prompt, params=params)

    async def _ask(
        self, member: Member, manifest: "WeightManifest", request: GenerationRequest, phase: str
    ) -> tuple[dict[str, str], Completion] | RayrlError:
        """Return the engine's checksums and its answer to the probe, or why it gave none."""

        async def call(method: str, *args: Any) -> Any:
            ref = getattr(member.handle, method).remote(*args)
            return await wait_for(ref, seconds=self._seconds, phase=phase, actor=member.label, what=f"{method}()")

        try:
            checksums = await call("weight_checksums", manifest)
            return dict(checksums), await call("sample_probe", request, 0.8 * self._seconds)
        except RayrlError as error:
            return error

    def _record(self, verdict: ProbeVerdict, step: int) -> None:
        for kind, faults in (("probe_bad_engine", verdict.bad_engines), ("probe_alarm", verdict.alarms)):
            for engine, reason in faults.items():
                _LOGGER.warning("probe of version %d: %s: %s", verdict.version, engine, reason)
                self._ledger.record_event(
                    kind, step=step, detail={"engine": engine, "version": verdict.version, "reason": reason}
                )
        _LOGGER.info(
            "probe of version %d: %d weights compared, mean logprob difference %.4g nats",
            verdict.version,
            verdict.num_checksums,
            verdict.logprob_diff,
        )


def probe_prompt(vocab_size: int) -> tuple[int, ...]:
    """Return tokens from all over a vocabulary, always the same; any will do, and no tokenizer is needed."""
    return tuple((1 + index * vocab_size // _PROMPT_TOKENS) % vocab_size for index in range(_PROMPT_TOKENS))
