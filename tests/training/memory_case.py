"""Peak memory of the logprobs of many tokens over a large vocabulary, measured in a process of its own.

python memory_case.py {chunked|whole}        prints the bytes by which the peak exceeds what was there before
"""

import sys
from pathlib import Path

import torch

from rayrl.training.logprobs import HeadSettings, token_logprobs

VOCAB, HIDDEN = 150_000, 8


def main(how: str, num_tokens: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCAB, (num_tokens,))
    before = _peak()
    if how == "whole":
        with torch.no_grad():
            torch.log_softmax(hidden @ weight.t(), dim=-1).gather(1, targets[:, None])
    else:
        logprobs, _ = token_logprobs(hidden, weight, None, targets, HeadSettings(temperature=1.0, chunk_tokens=256))
        logprobs.sum().backward()
    sys.stdout.write(str(_peak() - before))


def _peak() -> int:
    # Not ru_maxrss: that begins with the peak of the process that started this one.
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
