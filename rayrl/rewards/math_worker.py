"""The child process of the `math` reward: reads problems from its input, writes verdicts. Run with `-m`.

A request is `{"answer", "completion", "alarm_s"}`, a reply `{"equal": bool}` or `{"error": text}`.
"""

import json
import logging
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Answer requests until the input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not be taken for a reply.
    os.dup2(2, 1)
    # The owner ends this process by its signals; those of the terminal are for the owner alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import math_verify  # noqa: F401 - before the ready line, so that no request waits for it

    logging.disable(logging.WARNING)
    replies.write(b"ready\n")
    replies.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Without a handler the alarm ends the process, even if its owner is gone and the library never returns.
        signal.setitimer(signal.ITIMER_REAL, request["alarm_s"])
        reply = _verify(request["answer"], request["completion"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _verify(answer: str, completion: str) -> dict[str, Any]:
    from math_verify import parse, verify

    # No timeouts of the library: it takes them for "not equal", and the owner has its own.
    try:
        gold = parse(f"${answer}$", parsing_timeout=None) if "$" not in answer and "\\boxed" not in answer else []
        gold = gold or parse(answer, parsing_timeout=None)
        if not gold:
            return {"error": f"math-verify finds no expression in the reference answer {answer!r}"}
        found = parse(completion, parsing_timeout=None, raise_on_error=True)
        return {"equal": bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))}
    except Exception as error:  # noqa: BLE001 - becomes a failure record on the other side
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
