"""Any function of the user, named `module:function`."""

import asyncio
import inspect

from rayrl.config import reward as config
from rayrl.errors import ConfigError, RayrlError, RewardError
from rayrl.rewards.result import checked_result
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import RewardResult
from rayrl.utils.daemon_thread import call_in_thread
from rayrl.utils.module_path import load_attribute

MAX_THREADS = 32
"""Calls of a synchronous function at one time; one that ran out of time is not counted any more."""


class FunctionReward:
    """Calls `function(prompt, completion, **params)`, a synchronous one on a thread.

    The function returns a number, a RewardResult, or a dict with `total` and named parts. Raises ConfigError if it
    cannot be imported, is no function, or cannot be called like this.
    """

    def __init__(self, settings: config.FunctionReward) -> None:
        self._settings = settings
        try:
            self._function = load_attribute(settings.path)
        except ValueError as error:
            raise ConfigError(f"reward.path: {error}") from error
        if not callable(self._function):
            raise ConfigError(f"reward.path {settings.path!r} is a {type(self._function).__name__}, not a function")
        try:
            inspect.signature(self._function).bind("prompt", "completion", **settings.params)
        except (TypeError, ValueError) as error:
            names = ", ".join(["prompt", "completion", *(f"{name}=..." for name in settings.params)])
            raise ConfigError(f"reward.path {settings.path!r} cannot be called with ({names}): {error}") from error
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            type(self._function).__call__
        )
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        """Return the function's result. RewardError if it raises, takes too long, or returns no finite number."""
        where = f"reward function {self._settings.path!r} on prompt {prompt.id}"
        if self._is_async:
            return await self._score(prompt, completion, where)
        async with self._threads:
            return await self._score(prompt, completion, where)

    async def _score(self, prompt: Prompt, completion: str, where: str) -> RewardResult:
        params = self._settings.params
        try:
            async with asyncio.timeout(self._settings.timeout_s) as deadline:
                if self._is_async:
                    value = await self._function(prompt, completion, **params)
                else:
                    value = await call_in_thread(self._function, prompt, completion, **params)
        except RayrlError:
            raise
        except Exception as error:
            if deadline.expired():
                raise RewardError(f"{where} took longer than reward.timeout_s={self._settings.timeout_s}") from error
            raise RewardError(f"{where} failed: {type(error).__name__}: {error}") from error
        return checked_result(value, where)
