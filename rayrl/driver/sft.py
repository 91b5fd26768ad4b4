"""`SFTRun`: supervised fine-tuning on prompts with answers."""

from dataclasses import dataclass
from typing import Any

from rayrl.config.supervised import SFTRunConfig
from rayrl.driver.fleet import Fleet
from rayrl.driver.preflight import check_sft_run
from rayrl.driver.result import RunResult
from rayrl.driver.resume import Resume
from rayrl.driver.supervised import SupervisedRun
from rayrl.training.settings import TrainWorkerSettings
from rayrl.types.prompt import Prompt


class SFTRun:
    """One supervised run; the result is exported as a model folder below `<run_dir>/export`."""

    def __init__(self, config: SFTRunConfig, resume: Resume = "never") -> None:
        """`resume` as in `Run`."""
        self._config = config
        self._resume = resume

    def train(self) -> RunResult:
        """Run to the end in this thread. Errors as in `Run.train`."""
        return SupervisedRun(self._config, _SFTTask(config=self._config), self._resume).train()


@dataclass(frozen=True, slots=True, kw_only=True)
class _SFTTask:
    """See `Task`."""

    config: SFTRunConfig
    step_method: str = "sft_step"

    def check(self) -> list[str]:
        return check_sft_run(self.config)

    def settings(self, common: TrainWorkerSettings) -> TrainWorkerSettings:
        return common

    def encode(self, fleet: Fleet, prompts: list[Prompt]) -> Any:
        sft = self.config.sft
        return fleet.rollout.members[0].handle.encode_examples.remote(prompts, sft.prompt_format, sft.system_prompt)

    def is_due(self, step: int) -> bool:
        return False

    async def evaluate(self, fleet: Fleet) -> dict[str, float]:
        return {}
