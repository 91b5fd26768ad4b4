"""User code that hangs, for the tests of the watchdog."""

import asyncio
import threading


def stuck_reward(prompt: object, completion: str) -> float:
    threading.Event().wait(600)
    return 0.0


class EndlessWorkflow:
    async def run_episode(self, prompt: object, sample_index: int, context: object) -> object:
        await asyncio.Event().wait()
        return None
