"""From the rewards of a whole batch to advantages, by name and settings."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from rayrl.algorithms.masking import as_bool
from rayrl.algorithms.signature import select_arguments
from rayrl.algorithms.tables import ADVANTAGES
from rayrl.algorithms.token_rewards import rewards_to_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What advantages are computed from: the whole batch of an optimizer step, not a micro-batch or a rank's part."""

    rewards: Tensor
    """[N] one scalar reward per trajectory."""
    group_ids: Tensor
    """[N] int64; trajectories with the same id share a prompt."""
    loss_mask: Tensor
    """[N, T] int or bool: 1 for sampled tokens that carry loss."""
    values: Tensor | None = None
    """[N, T] of the critic; needed by `gae`."""
    kl: Tensor | None = None
    """[N, T] penalty in the reward, from `kl_estimate`; used where token rewards are."""
    teacher_logprobs: Tensor | None = None
    """[N, T] of the teacher; needed by `distillation`."""
    sampler_logprobs: Tensor | None = None
    """[N, T] as the engine reported them; needed by `distillation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """The numbers of an advantage. A function takes those that it names; the others have no effect on it."""

    advantage: str = "grpo"
    """A name in `ADVANTAGES`."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    eps: float = 1e-6
    gamma: float = 1.0
    lam: float = 1.0
    k: int = 4
    threshold: float = 0.5
    kl_coef: float = 0.0
    """Factor of `AdvantageInputs.kl` in the token rewards."""

    def __post_init__(self) -> None:
        if self.advantage not in ADVANTAGES:
            raise ValueError(f"advantage: {self.advantage!r} is not one of {', '.join(ADVANTAGES)}")


def compute_advantages(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[Tensor, Tensor | None]:
    """Return advantages, [N, 1] for one per trajectory or [N, T], and the returns [N, T] if a critic has to learn them.

    Raises:
        ValueError: the advantage needs an input that is None.
    """
    mask = as_bool(inputs.loss_mask)
    available: dict[str, Any] = {
        **asdict(settings),
        "rewards": inputs.rewards,
        "group_ids": inputs.group_ids,
        "loss_mask": mask,
        "lengths": mask.sum(-1),
        "token_rewards": rewards_to_tokens(inputs.rewards, mask, inputs.kl, settings.kl_coef),
        "values": inputs.values,
        "teacher_logprobs": inputs.teacher_logprobs,
        "sampler_logprobs": inputs.sampler_logprobs,
    }
    function = ADVANTAGES[settings.advantage]
    result = function(**select_arguments(function, available))
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    return (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages), returns
