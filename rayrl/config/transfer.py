"""How weights move from training to inference."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section


class TransferConfig(Section):
    """How weights move from training to inference."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto` is nccl if both sides have GPUs, else gloo."""
    bucket_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Size of one broadcast; larger tensors are split."""
