"""A child process that answers one request at a time and is killed when it takes too long.

Consumes: requests of any number of episodes, one after the other (a lock). Produces: one reply line for each request.
Waits for: the child's ready line, then its reply; a kill ends either wait, since the pipe closes.
Shutdown: `close` kills the child; if this process dies, the child reads the end of its input and leaves.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rayrl.utils.daemon_thread import call_in_thread
from rayrl.utils.logger import get_logger

_log = get_logger("rewards")

START_TIMEOUT_S = 120.0
"""From starting the child to its ready line: Python and its imports, on a machine that may be busy."""


class KillableProcess:
    """Runs `python ARGUMENTS`, started with the first request and again after each kill.

    The child writes one line when it is ready, then reads and writes one JSON object per line. It is a plain child
    with pipes, not a multiprocessing one, which would import the main module of the process that owns it.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = asyncio.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child, None if there is none now."""
        return None if self._process is None else self._process.pid

    async def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the child's reply to `request`.

        Raises TimeoutError if it takes longer than `timeout_s`, waiting for other requests not counted, and EOFError if
        the child dies; it is gone then, as it is after a cancellation.
        """
        async with self._lock:
            try:
                process = self._process or await self._start()
                async with asyncio.timeout(timeout_s):
                    line = await call_in_thread(_exchange, process, json.dumps(request).encode() + b"\n")
            except BaseException:
                # The reply may still come, and would be taken for that to the next request.
                self._kill()
                raise
        reply: dict[str, Any] = json.loads(line)
        return reply

    async def close(self) -> None:
        """Kill the child, also in the middle of a request, and start no other."""
        self._is_closed = True
        self._kill()

    async def _start(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise EOFError("the process was closed")
        self._process = process = self._spawn()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await call_in_thread(_exchange, process, b"")
        except TimeoutError as error:
            raise EOFError(f"the process was not ready within {START_TIMEOUT_S} s") from error
        return process

    def _spawn(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return subprocess.Popen(
            [sys.executable, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError as error:
                _log.debug("closing a pipe of killed process %d: %s", process.pid, error)


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Write one line and read one. Raises EOFError if the child is gone."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        reply = process.stdout.readline()
    except (OSError, ValueError) as error:
        raise EOFError("the process closed its pipes") from error
    if not reply.endswith(b"\n"):
        raise EOFError(f"the process ended with exit code {process.poll()}")
    return reply
