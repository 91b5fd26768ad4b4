"""What several tests of training are made of; importable in spawned processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.model import ModelConfig
from rayrl.config.training import FsdpEngine as EngineConfig
from rayrl.config.training import OptimizerConfig, ParallelConfig, TrainingConfig
from rayrl.config.transfer import TransferConfig
from rayrl.training.batch import TrainBatch, batch_from_arrow
from rayrl.training.engine import TrainEngine, TrainEngineSettings
from rayrl.training.losses import batch_advantages
from rayrl.training.registry import make_train_engine
from rayrl.training.settings import TrainWorkerSettings
from rayrl.types.arrow import trajectories_to_batch
from rayrl.types.prompt import PromptId
from rayrl.types.trajectory import FailureRecord, Trajectory, VersionSpan

VOCAB = 61


def write_llama(folder: Path, *, tied: bool, scalar_head: bool = False, **overrides: Any) -> Path:
    """Save a random Llama with weights large enough that its logits are far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2} | overrides
    config = LlamaConfig(
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")  # a model folder is refused without one
    if scalar_head:
        save_file({"score.weight": 0.3 * torch.randn(1, config.hidden_size)}, folder / "score.safetensors")
    return folder


def write_moe(folder: Path, family: str, **overrides: Any) -> Path:
    """Save a random mixture of four experts, two for each token, of a family such as `Mixtral`."""
    import transformers

    torch.manual_seed(5)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48} | overrides
    config = getattr(transformers, f"{family}Config")(
        moe_intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        sliding_window=None,
        initializer_range=0.2,
        **sizes,
    )
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def trajectory(
    ordinal: int,
    prompt: list[int],
    completion: list[int],
    *,
    reward: float = 0.0,
    version: int = 0,
    sample_index: int = 0,
    failure: FailureRecord | None = None,
) -> Trajectory:
    """One answered prompt, all of it sampled by one version."""
    start, end = len(prompt), len(prompt) + len(completion)
    return Trajectory(
        prompt_id=PromptId(dataset="d", epoch=0, ordinal=ordinal),
        sample_index=sample_index,
        tokens=(*prompt, *completion),
        loss_mask=(0,) * start + (1,) * len(completion),
        logprobs=(0.0,) * start + tuple(-4.2 + 0.1 * (token % 7) for token in completion),
        spans=(VersionSpan(start=start, end=end, version=version),),
        reward=None if failure else reward,
        stop_reason="error" if failure else "stop",
        failure=failure,
    )


def random_groups(num_groups: int = 3, group_size: int = 4, seed: int = 0, version: int = 0) -> list[pa.RecordBatch]:
    """Groups of very different lengths, one record batch each, with rewards that differ within the group."""
    rng = np.random.default_rng(seed)
    batches = []
    for ordinal in range(num_groups):
        prompt = rng.integers(2, VOCAB, size=rng.integers(3, 20)).tolist()
        batches.append(
            trajectories_to_batch(
                [
                    trajectory(
                        ordinal,
                        prompt,
                        rng.integers(2, VOCAB, size=rng.integers(1, 12)).tolist(),
                        reward=float(rng.integers(0, 3)),
                        version=version,
                        sample_index=index,
                    )
                    for index in range(group_size)
                ]
            )
        )
    return batches


def random_batch(algorithm: AlgorithmConfig | None = None, **options: Any) -> TrainBatch:
    """The same as a batch with advantages."""
    from dataclasses import replace

    batch, _ = batch_from_arrow(random_groups(**options))
    return replace(batch, advantages=batch_advantages(batch, algorithm or AlgorithmConfig()))


def training_config(
    *,
    data: int = 1,
    parallel: dict[str, int] | None = None,
    micro_batch_tokens: int = 8192,
    lr: float = 0.01,
    eps: float = 1e-8,
    **engine: Any,
) -> TrainingConfig:
    """One layout: data ranks alone, or all axes by name."""
    return TrainingConfig(
        optimizer=OptimizerConfig(lr=lr, eps=eps, weight_decay=0.1),
        engine=EngineConfig(type="fsdp", **({"logprob_chunk_tokens": 8} | engine)),
        parallel=ParallelConfig(**(parallel or {"data": data})),
        micro_batch_tokens=micro_batch_tokens,
    )


def make_engine(
    folder: Path,
    config: TrainingConfig | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    temperature: float = 1.0,
    share_prompts: bool = True,
    **options: Any,
) -> Any:
    """One rank of an engine on CPU."""
    config = config or training_config()
    engine = config.engine.model_copy(update={"share_prompts": share_prompts})
    return make_train_engine(
        TrainEngineSettings(
            model=ModelConfig(path=str(folder)),
            training=config.model_copy(update={"engine": engine}),
            rank=rank,
            world_size=world_size,
            temperature=temperature,
            num_steps=100,
            device=torch.device("cpu"),
            **options,
        )
    )


def worker_settings(folder: Path, **overrides: Any) -> TrainWorkerSettings:
    """Settings of a worker."""
    values: dict[str, Any] = {
        "model": ModelConfig(path=str(folder)),
        "training": training_config(),
        "algorithm": AlgorithmConfig(),
        "temperature": 1.0,
        "minibatches": 1,
        "num_steps": 100,
        "max_new_tokens": 16,
        "seed": 0,
        "transfer": TransferConfig(),
    }
    return TrainWorkerSettings(**(values | overrides))


def weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """A copy of all weights."""
    return {name: tensor.clone() for name, tensor in engine.weight_tensors("float32")}
