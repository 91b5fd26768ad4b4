"""Which model is trained."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section


class ModelConfig(Section):
    """A local model folder (config.json, safetensors, tokenizer), as `rayrl models import` makes it."""

    path: str
    """Folder of the model, absolute or relative to the working directory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights in the inference engines. Training keeps float32 master weights."""
    max_context: int | None = Field(default=None, gt=0)
    """Prompt and completion together, in tokens; the model's own limit when empty."""
    trust_remote_code: bool = False
    """Run code from the model folder. Only for folders that you trust."""
