"""When checkpoints are written, where, and which are kept."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section


class CheckpointConfig(Section):
    """When checkpoints are written, where, and which are kept."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes one at the end only. One that falls due while the last is still being
    written is put off until that is done."""
    keep_last: int = Field(default=2, gt=0)
    """Older ones are removed once a newer one is complete."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints of steps divisible by this are never removed; 0 is none."""
    keep_best: str | None = Field(default=None, pattern=r"^eval/")
    """Metric of the evaluation, such as `eval/accuracy`, by which the best checkpoint is kept too. Only values that
    were measured on exactly the version of a checkpoint count."""
    keep_best_mode: Literal["max", "min"] = "max"
    """Whether the highest or the lowest value is the best."""
    at_end: bool = True
    """Write one after the last step and when the run is stopped."""
    background: bool = True
    """Train on while a checkpoint is written; takes one more copy of weights and moments on the host."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a checkpoint that cannot be written does: end the run, or be counted, with older ones left as they are."""
    grace_s: float | None = Field(default=None, gt=0)
    """Seconds from SIGTERM or Ctrl-C to the end, for the step under way and the last checkpoint. When they do not
    suffice the run leaves with what was saved before. Without limit when empty."""
    copy_to: str | None = None
    """URL or folder to which every complete checkpoint is copied as well: any that fsspec knows, `s3://bucket/run` for
    example. A resume fetches the newest from there if the run's folder has none."""
    export_hf: bool = True
    """Write the final weights as a model folder (safetensors and tokenizer) below the run's folder."""
