"""How weights move from training to inference."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section


class TransferConfig(Section):
    """How weights move from training to inference."""

    backend: Literal["auto", "gloo", "nccl", "object_store", "disk", "cuda_ipc"] = "auto"
    """`auto` is nccl if both sides have GPUs of their own, else gloo. `object_store` is Ray's; `disk` is a folder that
    engines outside the cluster can read, too; `cuda_ipc` is for engines that share a GPU with a training worker."""
    lora: Literal["merged", "adapters"] = "merged"
    """With `training.lora`: send whole weights with the adapters added to them, or the adapters alone, about a
    hundredth of the bytes. Engines then add them, each version anew, to the weights of the model folder, of which they
    keep a copy in host memory; not with the backends `disk` and `cuda_ipc`."""
    bucket_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Bytes that are sent and digested at once; larger tensors are split."""
    probe_every: int = Field(default=10, ge=0)
    """Versions between two checks of what the engines really hold: checksums of weights, and logprobs of a probe prompt
    against the trainer's. Also made at start and after each resume; 0 makes none at all."""
    probe_tolerance: float = Field(default=0.1, gt=0)
    """Mean difference of the probe's logprobs, in nats, above which a check raises the alarm; rounding to bfloat16
    alone gives a few hundredths."""
    folder: str | None = None
    """Of `disk`: where versions are written, on storage that all engines see; `weights` of the run when empty."""
    keep_versions: int = Field(default=2, gt=0)
    """Of `disk`: how many of the newest versions stay."""
