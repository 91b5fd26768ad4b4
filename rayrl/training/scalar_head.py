"""A causal language model with one number per position instead of logits: a critic, or a reward model.

The number of a position is `score @ hidden`, with the last hidden state of the backbone. At the token before a sampled
one it is the critic's value of the state; at the last token of a text it is the score of the text.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rayrl.errors import ModelError
from rayrl.training.logprobs import HeadSettings
from rayrl.training.policy_model import PolicyModel, check_head

HeadKind = Literal["policy", "scalar"]
"""What a model gives for a token: its logprob, or one number (critic, reward model)."""
HEAD = "score"
"""Name of the head in the model, as the sequence classifiers of transformers name it."""


class ScalarModel(PolicyModel):
    """As `PolicyModel`, with a number in the place of each logprob."""

    def _predict(self, hidden: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, None]:
        """Return float32 values [K] of the states that predict the targets."""
        weight: Tensor = self.lm.score.weight
        with torch.autocast(hidden.device.type, enabled=False):
            # One row: nothing to chunk, and float32 costs nothing.
            return (hidden.float() @ weight.float().t()).squeeze(-1), None


def make_model(
    lm: Any,
    head: HeadSettings,
    kind: HeadKind,
    *,
    folder: str | Path,
    device: torch.device,
    activation_checkpointing: bool = False,
) -> PolicyModel:
    """Return the model that training calls, on its device, with the head that is asked for.

    ModelError if training would not know what the family does to its logits.
    """
    if kind == "scalar":
        attach_scalar_head(lm, folder)
        return ScalarModel(lm, head, activation_checkpointing=activation_checkpointing).to(device)
    model = PolicyModel(lm, head, activation_checkpointing=activation_checkpointing).to(device)
    check_head(model)
    return model


def attach_scalar_head(lm: Any, folder: str | Path) -> None:
    """Replace the output head of `lm` by a scalar one: that of the folder's weights if it has one, else zeros.

    Zeros are the same on every rank, and a critic that starts at 0 changes no advantage by chance. Untied output
    weights are dropped, tied ones stay as the embedding.
    """
    output = lm.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise ModelError(f"model class {type(lm).__name__} has no linear output head, which a scalar head replaces")
    head = nn.Linear(output.in_features, 1, bias=False, device=output.weight.device, dtype=torch.float32)
    stored = stored_head(folder)
    with torch.no_grad():
        head.weight.zero_() if stored is None else head.weight.copy_(stored)
    lm.set_output_embeddings(nn.Identity())
    setattr(lm, HEAD, head)


def stored_head(folder: str | Path) -> Tensor | None:
    """Return the scalar head [1, H] that the weights of a model folder hold; None if they hold none."""
    name = f"{HEAD}.weight"
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as weights:
            if name in weights.keys():  # noqa: SIM118  the handle is no mapping
                head: Tensor = weights.get_tensor(name)
                if head.shape[0] != 1:
                    raise ModelError(f"{str(folder)!r} scores {head.shape[0]} classes; one number is needed")
                return head
    return None


def classifier_config(lm: Any) -> dict[str, Any]:
    """Return what config.json must say so that transformers loads the export as a sequence classifier with one label.

    For families that have no such class the folder is read by this project only.
    """
    name = type(lm).__name__.replace("ForCausalLM", "ForSequenceClassification")
    return {"architectures": [name], "id2label": {"0": "score"}, "label2id": {"score": 0}}
