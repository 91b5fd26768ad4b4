"""How weights move from training to inference."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section


class TransferConfig(Section):
    """How weights move from training to inference."""

    backend: Literal["auto", "gloo", "nccl", "object_store", "disk", "cuda_ipc"] = "auto"
    """`auto` is nccl if both sides have GPUs of their own, else gloo. `object_store` is Ray's; `disk` is a folder that
    engines outside the cluster can read, too; `cuda_ipc` is for engines that share a GPU with a training worker."""
    bucket_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Bytes that are sent and digested at once; larger tensors are split."""
    folder: str | None = None
    """Of `disk`: where versions are written, on storage that all engines see; `weights` of the run when empty."""
    keep_versions: int = Field(default=2, gt=0)
    """Of `disk`: how many of the newest versions stay."""
