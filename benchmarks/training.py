"""Trained tokens per second of the training engines against a plain PyTorch loop over the same tokens.

    this process ──go──> contestant (1 or 2 ranks, a process each) ──seconds──> this process      one step at a time

`one-rank` and `two-ranks`: the engines against a loop that gives the model one sequence at a time, without padding; it
has the same model, loss, AdamW and clipping, and the usual logits of all tokens. `packing`: a long-tailed distribution
of lengths, packed by our engine, padded by our engine (rows of like length together), and in ordinary batches: eight
sequences in the order of the data, padded to the longest of them. Contestants take turns; the others wait and compute
nothing. Needs the model folder (`make models`) and idle cores.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from rayrl.config.model import ModelConfig
from rayrl.config.training import DeepSpeedEngine, FsdpEngine, OptimizerConfig, ParallelConfig, TrainingConfig
from rayrl.training.batch import TrainBatch
from rayrl.training.engine import TrainEngineSettings
from rayrl.training.losses import SupervisedLoss
from rayrl.training.registry import make_train_engine

PARTS = {"one-rank": 1.0, "two-ranks": 2.0, "packing": 1.5}
"""The comparisons, and the tokens of a step of each as multiples of `--tokens`."""
BATCH_ROWS = 8
TIMEOUT_S = 280.0
Step = Callable[[], None]


def lengths_of(part: str, num_tokens: int) -> list[int]:
    """Return lengths of sequences that add up to about `num_tokens`."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        # Long-tailed: half of the sequences below 40 tokens, one in 25 above 300.
        length = rng.lognormal(math.log(40), 1.15) if part == "packing" else rng.uniform(64, 320)
        lengths.append(int(np.clip(length, 4, 1024)))
    return lengths


def make_batch(lengths: list[int], vocab_size: int) -> TrainBatch:
    """Return random tokens, all of which but the first of each sequence carry loss."""
    rng = np.random.default_rng(1)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    mask = np.ones(offsets[-1], dtype=np.uint8)
    mask[offsets[:-1]] = 0
    return TrainBatch(
        tokens=rng.integers(0, vocab_size, size=offsets[-1]).astype(np.int32),
        loss_mask=mask,
        logprobs=np.zeros(offsets[-1], dtype=np.float32),
        versions=np.full(offsets[-1], -1, dtype=np.int32),
        offsets=offsets,
        rewards=np.zeros(len(lengths), dtype=np.float32),
        group_ids=np.arange(len(lengths)),
    )


def engine_step(options: dict[str, Any], rank: int, world_size: int, batch: TrainBatch) -> Step:
    """Return the step of one of our engines."""
    kind = DeepSpeedEngine if options["engine"]["type"] == "deepspeed" else FsdpEngine
    training = TrainingConfig(
        optimizer=OptimizerConfig(lr=1e-6),
        engine=kind(**options["engine"]),
        parallel=ParallelConfig(data=world_size),
        micro_batch_tokens=options["micro_batch_tokens"],
    )
    engine = make_train_engine(
        TrainEngineSettings(
            model=ModelConfig(path=options["model"]),
            training=training,
            rank=rank,
            world_size=world_size,
            temperature=1.0,
            num_steps=1000,
            device=torch.device("cpu"),
        )
    )

    def step() -> None:
        result = engine.train_step(batch, SupervisedLoss())
        assert not result.skipped, result.reason

    return step


def plain_step(options: dict[str, Any], batch: TrainBatch) -> Step:
    """Return a step written down as one would without us: `rows` sequences at a time, padded to the longest."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    texts = [
        torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    ]
    rows = options["rows"]
    batches = [
        torch.nn.utils.rnn.pad_sequence(texts[first : first + rows], batch_first=True, padding_value=-100)
        for first in range(0, len(texts), rows)
    ]
    total = int(batch.loss_mask.sum())

    def step() -> None:
        for ids in batches:
            logits = model(input_ids=ids.clamp(min=0), use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
            )
            (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def serve(rank: int, options: dict[str, Any], store: str, lengths: list[int], pipe: Connection) -> None:
    """Make the step of one rank, then run it whenever told to."""
    torch.set_num_threads(options["threads"])
    world_size = options["ranks"]
    if world_size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    batch = make_batch(lengths, options["vocab_size"])
    is_plain = options["engine"] is None
    step = plain_step(options, batch) if is_plain else engine_step(options, rank, world_size, batch)
    pipe.send("ready")
    while pipe.recv():
        start = time.monotonic()
        step()
        pipe.send(time.monotonic() - start)


class Contestant:
    """The processes of one side."""

    def __init__(self, name: str, options: dict[str, Any], lengths: list[int], folder: Path) -> None:
        self.name = name
        self.seconds: list[float] = []
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(options["ranks"]):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, options, str(folder / name), lengths, theirs))
            process.daemon = True
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded."""
        for pipe in self._pipes:
            self._receive(pipe)

    def run(self, keep: bool = True) -> None:
        """Take a step; its time is that of the slowest rank."""
        for pipe in self._pipes:
            pipe.send(True)
        seconds = max(self._receive(pipe) for pipe in self._pipes)
        if keep:
            self.seconds.append(seconds)

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(False)
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()

    def _receive(self, pipe: Connection) -> Any:
        if not pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"{self.name} did not answer within {TIMEOUT_S:.0f} s")
        return pipe.recv()


def contestants_of(part: str, common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sides of a comparison; the first is what the others are measured against."""
    alone = common | {"ranks": 1, "threads": 2}
    plain = alone | {"engine": None, "rows": 1}
    if part == "packing":
        return {
            "padded, in order": plain | {"rows": BATCH_ROWS},
            "fsdp padded": alone | {"engine": {"type": "fsdp", "packing": False}},
            "fsdp packed": alone | {"engine": {"type": "fsdp"}},
        }
    layout = alone if part == "one-rank" else common | {"ranks": 2, "threads": 1}
    stages = (2,) if part == "one-rank" else (2, 3)
    zero = {f"deepspeed zero {stage}": {"type": "deepspeed", "zero_stage": stage} for stage in stages}
    engines = {"fsdp": {"type": "fsdp"}} | zero
    return {"plain loop": plain} | {name: layout | {"engine": engine} for name, engine in engines.items()}


def run_part(part: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Let the sides of a comparison take turns; print and return their tokens per second.

    Sides with several ranks meet the first side one by one: together their models would not fit into 24 GB.
    """
    lengths = lengths_of(part, round(arguments.tokens * PARTS[part]))
    config = json.loads((Path(arguments.model) / "config.json").read_text(encoding="utf-8"))
    common = {
        "model": arguments.model,
        "micro_batch_tokens": arguments.micro_batch_tokens,
        "vocab_size": config["vocab_size"],
    }
    (first, base), *others = contestants_of(part, common).items()
    if any(options["ranks"] > 1 for _, options in others):
        heats = [{first: base, name: options} for name, options in others]
    else:
        heats = [{first: base, **dict(others)}]
    return [run_heat(part, heat, lengths, arguments.rounds) for heat in heats]


def run_heat(part: str, heat: dict[str, dict[str, Any]], lengths: list[int], rounds: int) -> dict[str, Any]:
    """Let these sides take turns; the first is what the others are measured against."""
    load_before = os.getloadavg()[0]
    trained = sum(lengths) - len(lengths)
    sides: list[Contestant] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, options in heat.items():
                sides.append(Contestant(name, options, lengths, Path(folder)))
            for side in sides:
                side.wait_until_ready()
            for number in range(rounds + 1):
                for side in sides:
                    side.run(keep=number > 0)  # the first step makes the optimizer's moments
        finally:
            for side in sides:
                side.close()
    rates = {side.name: trained / statistics.median(side.seconds) for side in sides}
    base = rates[sides[0].name]
    print(f"{part}: {len(lengths)} sequences, {trained} trained tokens a step, load before {load_before:.1f}")
    for side in sides:
        seconds = ", ".join(f"{value:.2f}" for value in side.seconds)
        print(f"{side.name:20s} {rates[side.name]:8.1f} tokens/s   {rates[side.name] / base:5.2f}   ({seconds} s)")
    sys.stdout.flush()
    return {"load_before": load_before, "tokens_per_s": rates, "seconds": {side.name: side.seconds for side in sides}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*PARTS, "all"), nargs="?", default="all")
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=800, help="tokens of one step of one rank")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    parts = list(PARTS) if arguments.part == "all" else [arguments.part]
    results = {part: run_part(part, arguments) for part in parts}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
