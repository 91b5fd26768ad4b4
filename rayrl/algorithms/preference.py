"""Losses on pairs of a chosen and a rejected answer: DPO, IPO and the Bradley-Terry reward model.

Sources: DPO Rafailov et al. 2023, arXiv:2305.18290; label smoothing (cDPO) Mitchell 2023; IPO Azar et al. 2023,
arXiv:2310.12036; Bradley and Terry 1952, with the centring term of Eisenstein et al. 2023, arXiv:2312.09244.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from rayrl.algorithms.masking import as_bool, live, safe_mean


def sequence_logprobs(logprobs: Tensor, loss_mask: Tensor, average: bool = False) -> Tensor:
    """Return the sum of the live logprobs of each trajectory [N], or their mean; 0 without live tokens.

    Args:
        logprobs: [N, T], with gradient.
        loss_mask: [N, T] int or bool.
    """
    mask = as_bool(loss_mask)
    known = live(logprobs, mask)
    return safe_mean(known, mask, dim=-1).squeeze(-1) if average else known.sum(-1)


def _margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """Return how much more the policy prefers the chosen answer than the reference does, in nats [P]."""
    return (chosen - rejected) - (ref_chosen - ref_rejected).detach()


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return one loss per pair [P].

        h = log(pi(c) / pi_ref(c)) - log(pi(r) / pi_ref(r))
        loss = -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)

    Args:
        chosen_logprobs, rejected_logprobs: [P] sums over the answer (`sequence_logprobs`), with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [P] of the reference, without.
        beta: strength of the tie to the reference.
        label_smoothing: s, the share of pairs that are believed to be swapped; 0 is DPO.
    """
    scaled = beta * _margin(chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs)
    return -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)


def ipo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """Return `(h - 1 / (2 beta))^2` per pair [P], with h as in `dpo_loss`.

    The paper takes sums over the answer; TRL takes means: `sequence_logprobs(average=True)`.
    """
    margin = _margin(chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs)
    return (margin - 1 / (2 * beta)) ** 2


def bradley_terry_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, margin: Tensor | float = 0.0, center_coef: float = 0.0
) -> Tensor:
    """Return `-log sigmoid(s_c - s_r - margin) + center_coef (s_c + s_r)^2` per pair [P].

    Args:
        chosen_scores, rejected_scores: [P] scalar outputs of the reward model, with gradient.
        margin: by how much the chosen one must win, [P] or one number.
        center_coef: holds the scores around 0, which the comparison alone leaves free.
    """
    losses = -logsigmoid(chosen_scores - rejected_scores - margin)
    return losses + center_coef * (chosen_scores + rejected_scores) ** 2 if center_coef else losses
