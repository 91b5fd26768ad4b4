"""Whether the chosen training engine can be made at all; decided before anything starts."""

from importlib.util import find_spec

from rayrl.config.model import ModelConfig
from rayrl.config.training import TrainingConfig
from rayrl.errors import ConfigError


def check_engine(model: ModelConfig, training: TrainingConfig) -> str:
    """Return the engine in words.

    ConfigError if a library that it needs is not installed, ModelError if `training.lora` names no layer of the model.
    """
    engine, lora = training.engine, training.lora
    if engine.type == "deepspeed" and find_spec("deepspeed") is None:
        raise ConfigError("training.engine.type=deepspeed needs DeepSpeed: pip install 'rayrl[deepspeed]'")
    name = f"deepspeed, ZeRO {engine.zero_stage}" if engine.type == "deepspeed" else "fsdp"
    if lora is None:
        return name
    if find_spec("peft") is None:
        raise ConfigError("training.lora needs peft: pip install 'rayrl[lora]'")
    from rayrl.models.loading import create_empty_causal_lm
    from rayrl.training.lora import check_targets

    check_targets(create_empty_causal_lm(model.path, trust_remote_code=model.trust_remote_code), lora.target_modules)
    return f"{name}, LoRA of rank {lora.r} on {', '.join(lora.target_modules)}"
