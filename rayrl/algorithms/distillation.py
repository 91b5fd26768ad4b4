"""On-policy distillation: the student samples, the teacher scores each token.

Sources: Agarwal et al. 2023 (GKD), arXiv:2306.13649; as an advantage, Lu and Thinking Machines 2025.
"""

from torch import Tensor

from rayrl.algorithms.masking import as_bool, live


def distillation_advantages(teacher_logprobs: Tensor, sampler_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return `log pi_teacher - log pi_student` per token [N, T] without gradient, 0 where the mask is 0.

    The negative k1 estimate of KL(student || teacher), as an advantage for any objective in `OBJECTIVES`. There is no
    baseline and no discount: each token answers for itself.

    Args:
        teacher_logprobs: [N, T] of the student's tokens under the teacher.
        sampler_logprobs: [N, T] of the student: the one that is trained, which is the one that sampled where nothing is
            stale. With importance weights between the two the gradient is then that of the KL of the trained student.
        loss_mask: [N, T] int or bool.

    NaN in a live position stays NaN.
    """
    mask = as_bool(loss_mask)
    return live(teacher_logprobs.detach(), mask) - live(sampler_logprobs.detach(), mask)
