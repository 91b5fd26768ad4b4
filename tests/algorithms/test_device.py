"""Hot paths never wait for the device: no operator that copies a value to the host, or whose shape depends on data."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayrl.algorithms import (
    OBJECTIVES,
    LossInputs,
    ObjectiveSettings,
    aggregate_loss,
    gae,
    loss_denominator,
    masked_whiten,
    mean_metrics,
    mismatch_metrics,
    nonfinite_report,
    policy_loss,
)

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "item", "is_nonzero"}


class RefuseWaiting(TorchDispatchMode):
    """Raises on an operator that would wait for a GPU; works on CPU tensors too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def test_guard_refuses_a_transfer_to_the_host() -> None:
    with RefuseWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(1).item()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_of_a_micro_batch_does_not_wait_for_the_device(name: str) -> None:
    old, mask = -torch.rand(3, 8), torch.rand(3, 8) < 0.7
    new = (old + 0.1 * torch.randn(3, 8)).requires_grad_(True)
    inputs = LossInputs(
        logprobs=new,
        proximal_logprobs=old,
        sampler_logprobs=old,
        ref_logprobs=old,
        advantages=torch.randn(3, 1),
        loss_mask=mask,
    )

    with RefuseWaiting():
        losses, sums = policy_loss(inputs, ObjectiveSettings(objective=name, kl_coef=0.1, rejection_level="geometric"))
        aggregate_loss(losses, mask, denominator=loss_denominator(mask)).backward()
        counts = nonfinite_report(loss_mask=mask, losses=losses)
        metrics = mean_metrics(sums) | mismatch_metrics(old, old, mask)

    assert new.grad is not None
    assert counts["losses"] == 0
    assert all(torch.isfinite(value) for value in metrics.values())


def test_token_level_advantages_do_not_wait_for_the_device() -> None:
    values, mask = torch.rand(3, 8), torch.rand(3, 8) < 0.7

    with RefuseWaiting():
        advantages, _ = gae(values, values, mask, 0.9, 0.9)
        result = masked_whiten(advantages, mask)

    assert torch.isfinite(result).all()
