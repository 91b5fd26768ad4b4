"""One block of TRL's GRPOTrainer for `train_vs_trl.py`, in a process of its own.

Model, prompts and their order, reward, batch and optimizer come from the rayrl config, through rayrl's own classes, so
that both sides train on the same thing. The result is
`{"started": t, "steps": [{"ended": t, "step_s": 40.1, "generate_s": 20.0, ...}, ...]}` with Unix times in seconds.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rayrl.config.rollout import SingleTurnWorkflow
from rayrl.config.run import RunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.registry import load_source
from rayrl.models.tokenizer import HfTokenizer, load_tokenizer
from rayrl.rewards.registry import make_reward
from rayrl.rollout.single_turn import encode_prompt
from rayrl.types.prompt import Prompt

PRECISIONS = {
    "bf16": "float32 weights, bfloat16 autocast",
    "fp32": "float32 throughout",
    "pure_bf16": "bfloat16 weights, moments and updates; at this learning rate most updates round to nothing",
}


class StepClock(TrainerCallback):
    """Sums up what the phases of a step took, and closes its books when the optimizer step is done."""

    def __init__(self) -> None:
        self.started = 0.0
        self.steps: list[dict[str, float]] = []
        self.current: dict[str, float] = {}

    def add(self, name: str, value: float) -> None:
        self.current[name] = self.current.get(name, 0.0) + value

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = self._step_began = time.time()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer_began = time.time()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.add("optimizer_s", time.time() - self._optimizer_began)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ended = time.time()
        self.steps.append({"ended": ended, "step_s": ended - self._step_began, **self.current})
        self.current, self._step_began = {}, ended
        phases = " ".join(f"{name}={value:.2f}" for name, value in self.steps[-1].items() if name != "ended")
        print(f"trl: step {state.global_step}/{state.max_steps} {phases}", flush=True)


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes how long its phases take; it changes nothing."""

    clock: StepClock

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        result = super()._generate_single_turn(*args, **kwargs)
        self.clock.add("generate_s", time.time() - began)
        self.clock.add("sampled_tokens", sum(len(tokens) for tokens in result[0]))
        return result

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        result = super()._calculate_rewards(*args, **kwargs)
        self.clock.add("reward_s", time.time() - began)
        self.clock.add("reward_mean", float(result.sum(dim=1).mean()))
        return result

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        result = super()._generate_and_score_completions(*args, **kwargs)
        self.clock.add("rollout_s", time.time() - began)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        rollout_before = self.clock.current.get("rollout_s", 0.0)
        began = time.time()
        result = super().training_step(*args, **kwargs)
        rollout_s = self.clock.current.get("rollout_s", 0.0) - rollout_before
        self.clock.add("forward_backward_s", time.time() - began - rollout_s)
        return result


def trl_config(config: RunConfig, *, num_steps: int, precision: str, micro_batch_size: int, folder: str) -> GRPOConfig:
    """Return TRL's settings: the numbers of the rayrl config, and the fastest CPU settings that train the same."""
    optimizer, algorithm, sampling = config.training.optimizer, config.algorithm, config.rollout.sampling
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=precision == "bf16",
        model_init_kwargs={"dtype": "bfloat16" if precision == "pure_bf16" else "float32"},
        # True, the default, costs a second forward pass to save memory that is not short here.
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=config.samples_per_step // micro_batch_size,
        num_generations=config.rollout.group_size,
        max_completion_length=sampling.max_new_tokens,
        temperature=sampling.temperature,
        max_steps=num_steps,
        shuffle_dataset=False,
        seed=config.run.seed,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def check_same_objective(config: RunConfig) -> None:
    """Stop where the rayrl config asks for something that `trl_config` does not translate."""
    algorithm = config.algorithm
    expected = {
        "training.schedule.type": (config.training.schedule.type, "constant"),
        "training.schedule.warmup_steps": (config.training.schedule.warmup_steps, 0),
        "driver.minibatches": (config.driver.minibatches, 1),
        "algorithm.advantage": (algorithm.advantage, "grpo"),
        "algorithm.advantage_scale": (algorithm.advantage_scale, "group_std"),
        "algorithm.objective": (algorithm.objective, "ppo_clip"),
        "algorithm.aggregation": (algorithm.aggregation, "token_mean"),
        "algorithm.kl.coef": (algorithm.kl.coef, 0.0),
        "algorithm.entropy_coef": (algorithm.entropy_coef, 0.0),
    }
    for name, (value, only) in expected.items():
        if value != only:
            raise SystemExit(f"trl: {name}={value!r} has no translation for TRL here; the benchmark needs {only!r}")


def load_prompts(config: RunConfig, tokenizer: HfTokenizer, num_prompts: int) -> tuple[list[Prompt], Dataset]:
    """Return the first prompts of rayrl's stream and TRL's dataset of them; stop if the token ids would differ."""
    workflow = config.rollout.workflow
    if not isinstance(workflow, SingleTurnWorkflow) or workflow.prompt_format != "chat" or workflow.system_prompt:
        raise SystemExit("trl: the benchmark needs rollout.workflow: {type: single_turn}, without a system prompt")
    stream = PromptStream(load_source(config.dataset), seed=config.run.seed, shuffle=config.dataset.shuffle)
    prompts = [stream.next_prompt() for _ in range(num_prompts)]
    rows = [{"prompt": [{"role": "user", "content": prompt.text}], "index": i} for i, prompt in enumerate(prompts)]
    trl_tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    for prompt, row in zip(prompts, rows, strict=True):
        theirs = trl_tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        if list(theirs) != encode_prompt(prompt, tokenizer, "chat", None):
            raise SystemExit(f"trl: prompt {prompt.id} has other token ids than in rayrl")
    return prompts, Dataset.from_list(rows)


def reward_function(config: RunConfig, prompts: Sequence[Prompt], tokenizer: HfTokenizer) -> Callable[..., Any]:
    """Return rayrl's reward in the form of TRL's reward functions."""
    reward = make_reward(config.reward)

    async def score_all(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        results = await asyncio.gather(
            *(reward.score(prompts[i], tokenizer.decode(ids)) for i, ids in zip(index, completion_ids, strict=True))
        )
        return [result.total for result in results]

    return score_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    config = RunConfig.load(args.config, args.overrides)
    check_same_objective(config)
    tokenizer = load_tokenizer(config.model.path)
    prompts, dataset = load_prompts(config, tokenizer, args.steps * config.driver.groups_per_step)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=config.model.path,
            args=trl_config(
                config,
                num_steps=args.steps,
                precision=args.precision,
                micro_batch_size=args.micro_batch,
                folder=folder,
            ),
            reward_funcs=reward_function(config, prompts, tokenizer),
            train_dataset=dataset,
            callbacks=[clock],
        )
        trainer.clock = clock
        trainer.train()
    args.result.write_text(json.dumps({"started": clock.started, "steps": clock.steps}))


if __name__ == "__main__":
    main()
