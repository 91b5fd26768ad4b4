"""How far the student is from its teacher on the tokens that it sampled."""

from rayrl.training.batch import TrainBatch


def distillation_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return `distillation/reverse_kl`, the mean of `log pi_student - log pi_teacher` over the loss-carrying tokens.

    The k1 estimate of KL(student || teacher) in nats per token, with the student that sampled. Empty without teacher.
    """
    if batch.teacher_logprobs is None:
        return {}
    live = batch.loss_mask != 0
    gap = batch.logprobs[live] - batch.teacher_logprobs[live]
    return {"distillation/reverse_kl": float(gap.mean()) if gap.size else 0.0}
