"""1 if math-verify finds the completion's answer equal to the reference answer, else 0."""

from rayrl.config import reward as config
from rayrl.errors import RewardError
from rayrl.rewards.killable_process import KillableProcess
from rayrl.rewards.result import require_answer
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import RewardResult
from rayrl.utils.logger import get_logger

_log = get_logger("rewards")

_WORKER = ("-m", "rayrl.rewards.math_worker")
_ALARM_GRACE_S = 5.0


class MathReward:
    """Asks a child process, because simplifying what a model wrote can take for ever. One request at a time."""

    def __init__(self, settings: config.MathReward) -> None:
        self._timeout_s = settings.timeout_s
        self._process = KillableProcess(_WORKER)

    @property
    def pid(self) -> int | None:
        """Process id of the child, None before the first score and after a kill."""
        return self._process.pid

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        """Return 1 or 0.

        Raises RewardError if the prompt has no answer or none that can be read, if math-verify fails, takes longer than
        `timeout_s`, or its process dies twice.
        """
        answer = require_answer(prompt, "math")
        request = {"answer": answer, "completion": completion, "alarm_s": self._timeout_s + _ALARM_GRACE_S}
        where = f"reward math on prompt {prompt.id}"
        try:
            try:
                reply = await self._process.ask(request, self._timeout_s)
            except EOFError as error:
                # Not necessarily this request's fault: the process may have been killed while it was idle.
                _log.warning("math process died (%s), trying again with a new one", error)
                reply = await self._process.ask(request, self._timeout_s)
        except TimeoutError as error:
            raise RewardError(f"{where} took longer than reward.timeout_s={self._timeout_s}") from error
        except EOFError as error:
            raise RewardError(f"{where}: its process died twice: {error}") from error
        if "error" in reply:
            raise RewardError(f"{where} failed: {reply['error']}")
        return RewardResult(total=float(reply["equal"]))

    async def close(self) -> None:
        """End the child process."""
        await self._process.close()
