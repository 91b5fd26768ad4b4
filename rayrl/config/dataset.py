"""Where prompts come from: one class per source, chosen by `type`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rayrl.config.base import Section


class _DatasetBase(Section):
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in prompt ids and metrics; derived from the source when empty."""
    shuffle: bool = True
    """A new order each epoch, drawn from `run.seed` and the epoch."""
    epochs: int | None = Field(default=None, gt=0)
    """Passes over the prompts; a run that needs more ends with an error that says so. Endless when empty."""


class ReasoningGymDataset(_DatasetBase):
    """Procedural problems with verifiers from the reasoning-gym library."""

    type: Literal["reasoning_gym"]
    task: str
    """Name of the task, for example `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the task, as reasoning-gym names them."""
    size: int = Field(default=10_000, gt=0)
    """Number of problems in one epoch."""
    seed: int = Field(default=0, ge=0)
    """Seed of the problems; another seed is another set of problems."""


class ArithmeticDataset(_DatasetBase):
    """Sums such as `3+4+5=` for very small models; train and held-out parts are disjoint."""

    type: Literal["arithmetic"]
    num_operands: int = Field(default=3, ge=2, le=5)
    """Numbers in each sum."""
    max_operand: int = Field(default=9, ge=1, le=999)
    """Largest number; the smallest is 0."""
    split: Literal["train", "held_out"] = "train"
    """Every problem belongs to exactly one of the two."""
    held_out_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of the problems in the held-out part."""
    size: int | None = Field(default=None, gt=0)
    """At most this many problems of the split; all when empty."""
    with_rejected: bool = False
    """Give each problem a wrong answer near the right one in its field `rejected`, for preference training."""


class JsonlDataset(_DatasetBase):
    """One JSON object per line."""

    type: Literal["jsonl"]
    path: str
    """File, absolute or relative to the working directory."""
    prompt_field: str = "prompt"
    """Field with the question (text), or with a list of `{role, content}` messages."""
    answer_field: str | None = "answer"
    """Field with the reference answer; null if there is none."""


class ParquetDataset(_DatasetBase):
    """A Parquet file or a folder of them."""

    type: Literal["parquet"]
    path: str
    """File or folder, absolute or relative to the working directory."""
    prompt_field: str = "prompt"
    """Column with the question (text), or with a list of `{role, content}` messages."""
    answer_field: str | None = "answer"
    """Column with the reference answer; null if there is none."""


class HuggingFaceDataset(_DatasetBase):
    """A dataset of the Hugging Face hub; needs `pip install 'rayrl[huggingface]'`."""

    type: Literal["huggingface"]
    path: str
    """Hub id or local folder, as `datasets.load_dataset` takes it."""
    subset: str | None = None
    """Configuration name of the dataset."""
    split: str = "train"
    """Split, slices such as `train[:1000]` included."""
    prompt_field: str = "prompt"
    """Column with the question (text), or with a list of `{role, content}` messages."""
    answer_field: str | None = "answer"
    """Column with the reference answer; null if there is none."""


DatasetConfig = Annotated[
    ReasoningGymDataset | ArithmeticDataset | JsonlDataset | ParquetDataset | HuggingFaceDataset,
    Field(discriminator="type"),
]
