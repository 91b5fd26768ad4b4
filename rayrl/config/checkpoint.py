"""When checkpoints are written and how many are kept."""

from pydantic import Field

from rayrl.config.base import Section


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes one at the end only."""
    keep_last: int = Field(default=2, gt=0)
    """Older ones are removed once a newer one is complete."""
    at_end: bool = True
    """Write one after the last step and when the run is stopped."""
    export_hf: bool = True
    """Write the final weights as a model folder (safetensors and tokenizer) below the run's folder."""
