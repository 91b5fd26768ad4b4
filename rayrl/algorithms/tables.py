"""Name -> function. A new algorithm is one file and one line here."""

from collections.abc import Callable, Mapping

from torch import Tensor

from rayrl.algorithms.cispo import cispo_loss
from rayrl.algorithms.covariance import clip_cov_held_back, clip_cov_loss, kl_cov_held_back, kl_cov_loss
from rayrl.algorithms.distillation import distillation_advantages
from rayrl.algorithms.dppo import dppo_loss
from rayrl.algorithms.dr_grpo import dr_grpo_advantages
from rayrl.algorithms.generalized_advantage import gae
from rayrl.algorithms.gmpo import gmpo_loss
from rayrl.algorithms.gpg import gpg_advantages
from rayrl.algorithms.grpo import grpo_advantages
from rayrl.algorithms.gspo import gspo_loss
from rayrl.algorithms.m2po import m2po_held_back, m2po_loss
from rayrl.algorithms.maxrl import maxrl_advantages
from rayrl.algorithms.opo import opo_advantages
from rayrl.algorithms.pass_at_k import pass_at_k_advantages
from rayrl.algorithms.ppo import ppo_clip_loss
from rayrl.algorithms.ratio import RatioLevel
from rayrl.algorithms.reinforce import reinforce_loss
from rayrl.algorithms.reinforce_pp import reinforce_pp_advantages, reinforce_pp_baseline_advantages
from rayrl.algorithms.returns import discounted_returns
from rayrl.algorithms.rloo import rloo_advantages
from rayrl.algorithms.sapo import sapo_loss

ADVANTAGES: Mapping[str, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "maxrl": maxrl_advantages,
    "opo": opo_advantages,
    "gpg": gpg_advantages,
    "pass_at_k": pass_at_k_advantages,
    "reinforce_pp": reinforce_pp_advantages,
    "reinforce_pp_baseline": reinforce_pp_baseline_advantages,
    "returns": discounted_returns,
    "gae": gae,
    "distillation": distillation_advantages,
}
"""From rewards to advantages, [N] or [N, T]; `gae` returns the critic's targets too. Each takes by name what it needs
of the fields of `AdvantageInputs` and `AdvantageSettings`, and of `lengths` and `token_rewards`, made from them."""

OBJECTIVES: Mapping[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "reinforce": reinforce_loss,
    "gmpo": gmpo_loss,
    "dppo": dppo_loss,
    "m2po": m2po_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
}
"""From advantages to per-token losses [N, T]. Each takes by name what it needs of `logprobs`, `old_logprobs`,
`advantages`, `loss_mask`, `held_back` and the fields of `ObjectiveSettings`."""

SELECTIONS: Mapping[str, Callable[..., Tensor]] = {
    "m2po": m2po_held_back,
    "clip_cov": clip_cov_held_back,
    "kl_cov": kl_cov_held_back,
}
"""Of the objectives that treat some tokens apart: which, [N, T] bool, chosen over all tokens of an optimizer step."""

RATIO_LEVELS: Mapping[str, RatioLevel] = {"gspo": "geometric"}
"""At which level an objective clips its ratio, for the metrics; `token` for those that are not here."""
