"""`PreferenceRun` and `RewardModelRun`: training on pairs of a better and a worse answer, with held-out pairs."""

from dataclasses import replace
from typing import Any

from rayrl.config.supervised import PairRunConfig, PairSection, PreferenceRunConfig, RewardModelRunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.registry import load_source
from rayrl.driver.fleet import Fleet
from rayrl.driver.preflight import check_pair_run
from rayrl.driver.result import RunResult
from rayrl.driver.resume import Resume
from rayrl.driver.supervised import SupervisedRun
from rayrl.rollout.pair_examples import PairEncoding
from rayrl.training.settings import TrainWorkerSettings
from rayrl.types.prompt import Prompt


class PreferenceRun:
    """Preference training of a policy; the result is exported as a model folder below `<run_dir>/export`."""

    def __init__(self, config: PreferenceRunConfig, resume: Resume = "never") -> None:
        """`resume` as in `Run`."""
        self._config = config
        self._resume = resume

    def train(self) -> RunResult:
        """Run to the end in this thread. Errors as in `Run.train`."""
        return SupervisedRun(self._config, PairTask(self._config), self._resume).train()


class RewardModelRun:
    """Training of a reward model; the export is a model folder with a scalar head, for `reward.type: reward_model`."""

    def __init__(self, config: RewardModelRunConfig, resume: Resume = "never") -> None:
        """`resume` as in `Run`."""
        self._config = config
        self._resume = resume

    def train(self) -> RunResult:
        """Run to the end in this thread. Errors as in `Run.train`."""
        return SupervisedRun(self._config, PairTask(self._config), self._resume).train()


class PairTask:
    """See `Task`. Held-out metrics are `eval/...`; `eval/accuracy` is the share of pairs in the right order."""

    step_method = "pair_step"

    def __init__(self, config: PairRunConfig) -> None:
        self._config = config
        self._loss = pair_section(config)
        self._encoding = pair_encoding(config)
        self._held_out: list[Prompt] = []
        if config.evaluation is not None:
            source = load_source(config.evaluation.dataset)
            stream = PromptStream(source, seed=0, shuffle=False)
            count = min(len(source), config.evaluation.num_pairs or len(source))
            self._held_out = [stream.next_prompt() for _ in range(count)]

    def check(self) -> list[str]:
        return check_pair_run(self._config, self._encoding)

    def settings(self, common: TrainWorkerSettings) -> TrainWorkerSettings:
        return replace(common, pairs=self._loss)

    def encode(self, fleet: Fleet, prompts: list[Prompt]) -> Any:
        return fleet.rollout.members[0].handle.encode_pairs.remote(prompts, self._encoding)

    def is_due(self, step: int) -> bool:
        evaluation = self._config.evaluation
        return evaluation is not None and evaluation.every > 0 and step % evaluation.every == 0

    async def evaluate(self, fleet: Fleet) -> dict[str, float]:
        size = self._config.loop.batch_size
        totals: dict[str, float] = {}
        for start in range(0, len(self._held_out), size):
            results = await fleet.train.call_all(
                "evaluate_pairs",
                self.encode(fleet, self._held_out[start : start + size]),
                seconds=self._config.loop.deadlines.step_s,
                phase=f"evaluation of held-out pairs from {start} on",
            )
            for name, value in results[0].items():
                totals[name] = totals.get(name, 0.0) + value
        num_pairs = totals.pop("num_pairs", 0.0)
        return {_held_out_name(name): value / num_pairs for name, value in totals.items()}


def _held_out_name(name: str) -> str:
    return "eval/loss" if name == "loss/total" else f"eval/{name.removeprefix('pairs/')}"


def pair_section(config: PairRunConfig) -> Any:
    """Return the section with the loss on pairs."""
    section: PairSection = config.loop
    return section


def pair_encoding(config: PairRunConfig) -> PairEncoding:
    """Return how the pairs of a run become tokens: a reward model reads out the end, a policy all of the answer."""
    loop = config.loop
    return PairEncoding(
        prompt_format=loop.prompt_format,
        system_prompt=loop.system_prompt,
        rejected_field=loop.rejected_field,
        loss_on="end" if isinstance(config, RewardModelRunConfig) else "answer",
    )
