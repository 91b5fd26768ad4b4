"""What DeepSpeed is told; plain data, so that it can be read and tested without DeepSpeed."""

from typing import Any

from rayrl.config.training import DeepSpeedEngine, TrainingConfig


def deepspeed_options(training: TrainingConfig, engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return DeepSpeed's config for the policy.

    Micro-batches, accumulation and learning rate are ours: the numbers of them here only satisfy its checks. Weights
    are float32, as in the other engine; with `autocast: bfloat16` the products are not.
    """
    zero: dict[str, Any] = {"stage": engine.zero_stage, "contiguous_gradients": True, "overlap_comm": False}
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": training.gpus_per_worker > 0}
    return _common() | {
        "gradient_clipping": training.optimizer.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # The optimizer is torch's AdamW in every case, so that an update does not depend on where it is computed.
        "zero_force_ds_cpu_optimizer": False,
        # Sums of gradients in the data type of the products would lose their last digits.
        "communication_data_type": "fp32",
        "torch_autocast": _autocast(engine),
    }


def frozen_options(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return DeepSpeed's config for a model that is only evaluated; for ZeRO 3, which divides it too."""
    return _common() | {"zero_optimization": {"stage": 3}, "torch_autocast": _autocast(engine)}


def _autocast(engine: DeepSpeedEngine) -> dict[str, Any]:
    # The list names modules whose gradients would be summed in bfloat16: none.
    return {"enabled": engine.autocast == "bfloat16", "dtype": "bfloat16", "lower_precision_safe_modules": []}


def _common() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
