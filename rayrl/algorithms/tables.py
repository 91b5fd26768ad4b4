"""Name -> function. A new algorithm is one file and one line here."""

from collections.abc import Callable, Mapping

from torch import Tensor

from rayrl.algorithms.cispo import cispo_loss
from rayrl.algorithms.grpo import grpo_advantages
from rayrl.algorithms.gspo import gspo_loss
from rayrl.algorithms.maxrl import maxrl_advantages
from rayrl.algorithms.ppo import ppo_clip_loss
from rayrl.algorithms.reinforce import reinforce_loss
from rayrl.algorithms.rloo import rloo_advantages
from rayrl.algorithms.sapo import sapo_loss

ADVANTAGES: Mapping[str, Callable[..., Tensor]] = {
    "grpo": grpo_advantages,
    "rloo": rloo_advantages,
    "maxrl": maxrl_advantages,
}
"""From rewards to advantages. Each takes by name what it needs of the fields of `AdvantageInputs` and its options."""

OBJECTIVES: Mapping[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "reinforce": reinforce_loss,
}
"""From advantages to per-token losses [N, T]. Each takes by name what it needs of `logprobs`, `old_logprobs`,
`advantages`, `loss_mask` and the fields of `ObjectiveSettings`."""
