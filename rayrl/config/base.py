"""The base of all config sections: frozen, closed, documented by the docstring below each field."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the config: unknown keys are refused, values cannot be changed after loading."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
