"""What an inference engine actor is started with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrl.config.inference import InferenceConfig
from rayrl.config.model import ModelConfig
from rayrl.config.training import LoraConfig
from rayrl.config.transfer import TransferConfig

if TYPE_CHECKING:
    from rayrl.infra.collective_recorder import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one engine actor; the same for all engines of a run."""

    model: ModelConfig
    """Its path must be valid on the node of the engine."""
    inference: InferenceConfig
    transfer: TransferConfig
    seed: int
    """Requests without a seed draw one from here; engines differ by their index."""
    recording: "Recording | None" = None
    """How collectives of the transfer group are recorded; None does not."""
    lora: LoraConfig | None = None
    """The adapters that publications consist of; None: whole weights come."""
    deterministic: bool = False
    """What a request gets does not depend on which others run, bit by bit; only the embedded engine can."""
