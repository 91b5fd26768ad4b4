"""What holds of every algorithm, whatever the numbers: order, padding, garbage, micro-batches, absent signal."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayrl.algorithms import (
    ADVANTAGES,
    OBJECTIVES,
    AdvantageInputs,
    AdvantageSettings,
    LossInputs,
    ObjectiveSettings,
    add_metrics,
    aggregate_loss,
    compute_advantages,
    discounted_returns,
    gae,
    importance_weights,
    kl_estimate,
    loss_denominator,
    m2po_loss,
    masked_whiten,
    mismatch_metrics,
    policy_loss,
    select_tokens,
    sft_loss,
    value_loss,
)

torch.set_num_threads(1)
quick = settings(max_examples=15, deadline=None)
Batch = dict[str, Tensor]

GROUP_ADVANTAGES = ["grpo", "dr_grpo", "rloo", "maxrl", "opo", "gpg", "pass_at_k", "reinforce_pp_baseline"]
MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
CHOOSING = {
    "clip_cov": {"cov_share": 0.4, "cov_low": 0.0},
    "kl_cov": {"cov_share": 0.4},
    "m2po": {"second_moment": 0.02},
}
"""Settings with which the objectives of `SELECTIONS` choose several tokens in batches as small as these."""


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Return a batch in float64 with ragged groups, holes in the mask and, often, empty rows."""
    num, length = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(scale: float) -> Tensor:
        return torch.randn(num, length, generator=random, dtype=torch.float64) * scale

    old = -normal(1.0).abs() - 0.05
    palette = torch.tensor([0.0, 0.1, 0.3, 1.0], dtype=torch.float64)
    return {
        "logprobs": old + normal(0.4),
        "old_logprobs": old,
        "sampler_logprobs": old + normal(0.4),
        "ref_logprobs": old + normal(0.4),
        "values": normal(1.0),
        "advantages": normal(1.5),
        "token_rewards": normal(1.0),
        "loss_mask": torch.rand(num, length, generator=random) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        "rewards": palette[torch.randint(0, 4, (num,), generator=random)],
        "group_ids": torch.randint(-2, 2, (num,), generator=random) * 1000,
    }


def advantages_of(name: str, batch: Batch) -> Tensor:
    inputs = AdvantageInputs(
        rewards=batch["rewards"],
        group_ids=batch["group_ids"],
        loss_mask=batch["loss_mask"],
        values=batch["values"],
        teacher_logprobs=batch["ref_logprobs"],
        sampler_logprobs=batch["sampler_logprobs"],
    )
    result = compute_advantages(inputs, AdvantageSettings(advantage=name, gamma=0.9, lam=0.8, k=2))[0]
    return result.expand_as(batch["loss_mask"])


def inputs_of(batch: Batch) -> LossInputs:
    return LossInputs(
        logprobs=batch["logprobs"],
        proximal_logprobs=batch["old_logprobs"],
        sampler_logprobs=batch["sampler_logprobs"],
        ref_logprobs=batch["ref_logprobs"],
        entropy=batch["values"],
        advantages=batch["advantages"],
        loss_mask=batch["loss_mask"],
        held_back=batch.get("held_back"),
    )


def objective_of(name: str, **options: Any) -> Callable[[Batch], Tensor]:
    def losses(batch: Batch) -> Tensor:
        torch.manual_seed(0)  # clip_cov draws from the default generator
        return policy_loss(inputs_of(batch), ObjectiveSettings(objective=name, **options))[0]

    return losses


PER_TOKEN: dict[str, Callable[[Batch], Tensor]] = {
    **{f"objective {name}": objective_of(name) for name in OBJECTIVES},
    "objective gspo by token": objective_of("gspo", ratio_form="token"),
    "objective with kl and entropy": objective_of("ppo_clip", kl_coef=0.1, entropy_coef=0.1, dual_clip=3.0),
    "objective with rejection": objective_of("ppo_clip", rejection_level="geometric", rejection_low=0.9),
    "importance by sequence": lambda b: importance_weights(
        b["old_logprobs"], b["sampler_logprobs"], b["loss_mask"], "sequence", "mask", 0.5, 5.0
    ),
    "importance by geometric mean": lambda b: importance_weights(
        b["old_logprobs"], b["sampler_logprobs"], b["loss_mask"], "geometric", "truncate", 0.5, None
    ),
    **{
        f"kl {form}": lambda b, form=form: kl_estimate(b["logprobs"], b["ref_logprobs"], form, b["loss_mask"])
        for form in ("k1", "k2", "k3", "abs")
    },
    "sft": lambda b: sft_loss(b["logprobs"], b["loss_mask"]),
    "value": lambda b: value_loss(b["logprobs"], b["values"], b["token_rewards"], b["loss_mask"]),
    "returns": lambda b: discounted_returns(b["token_rewards"], b["loss_mask"], 0.9),
    "gae advantages": lambda b: gae(b["token_rewards"], b["values"], b["loss_mask"], 0.9, 0.8)[0],
    "gae returns": lambda b: gae(b["token_rewards"], b["values"], b["loss_mask"], 0.9, 0.8)[1],
    "whiten": lambda b: masked_whiten(b["token_rewards"], b["loss_mask"]),
    **{f"advantages {name}": lambda b, name=name: advantages_of(name, b) for name in ADVANTAGES},
}
PER_TOKEN_IN_ORDER = [name for name in PER_TOKEN if "clip_cov" not in name]


def gradient_of(function: Callable[[Batch], Tensor], batch: Batch) -> Tensor | None:
    leaf = batch["logprobs"].clone().requires_grad_(True)
    result = function({**batch, "logprobs": leaf})
    return torch.autograd.grad(result.sum(), leaf)[0] if result.requires_grad else None


def with_garbage(batch: Batch, garbage: float) -> Batch:
    mask = batch["loss_mask"]
    return {
        name: torch.where(mask, value, garbage) if value.dtype == torch.float64 and value.dim() == 2 else value
        for name, value in batch.items()
    }


@pytest.mark.parametrize("name", PER_TOKEN)
@given(batch=batches(), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
@quick
def test_garbage_under_the_mask_changes_neither_values_nor_gradients(name: str, batch: Batch, garbage: float) -> None:
    function, dirty = PER_TOKEN[name], with_garbage(batch, garbage)

    clean_result, dirty_result = function(batch), function(dirty)

    torch.testing.assert_close(dirty_result, clean_result, rtol=0, atol=0)
    assert torch.isfinite(dirty_result).all()
    if not name.startswith("advantages") or name.split()[-1] not in GROUP_ADVANTAGES:
        assert (dirty_result[~batch["loss_mask"]] == 0).all()
    clean_gradient, dirty_gradient = gradient_of(function, batch), gradient_of(function, dirty)
    if clean_gradient is not None and dirty_gradient is not None:
        torch.testing.assert_close(dirty_gradient, clean_gradient, rtol=0, atol=0)
        assert (dirty_gradient[~batch["loss_mask"]] == 0).all()


@pytest.mark.parametrize("name", PER_TOKEN_IN_ORDER)
@given(batch=batches(), seed=st.integers(0, 1000))
@quick
def test_order_of_the_samples_does_not_matter(name: str, batch: Batch, seed: int) -> None:
    order = torch.randperm(len(batch["rewards"]), generator=torch.Generator().manual_seed(seed))

    shuffled = PER_TOKEN[name]({key: value[order] for key, value in batch.items()})

    torch.testing.assert_close(shuffled, PER_TOKEN[name](batch)[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PER_TOKEN_IN_ORDER)
@given(batch=batches(), left=st.integers(0, 2), right=st.integers(0, 2))
@quick
def test_padding_on_either_side_does_not_matter(name: str, batch: Batch, left: int, right: int) -> None:
    length = batch["loss_mask"].shape[1]
    padded = {
        key: torch.nn.functional.pad(value, (left, right), value=False if key == "loss_mask" else math.nan)
        if value.dim() == 2
        else value
        for key, value in batch.items()
    }

    result = PER_TOKEN[name](padded)[:, left : left + length]

    torch.testing.assert_close(result, PER_TOKEN[name](batch), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OBJECTIVES)
@given(batch=batches(), size=st.integers(1, 4))
@quick
def test_micro_batches_with_global_denominators_add_up_to_the_whole(
    name: str, mode: Any, batch: Batch, size: int
) -> None:
    options = CHOOSING.get(name, {})
    function = objective_of(name, **options)
    chosen = select_tokens(
        inputs_of(batch), ObjectiveSettings(objective=name, **options), torch.Generator().manual_seed(0)
    )
    batch = batch if chosen is None else {**batch, "held_back": chosen}

    def loss_of(part: Batch, denominator: Tensor | None) -> Tensor:
        return aggregate_loss(function(part), part["loss_mask"], mode, max_tokens=16, denominator=denominator)

    starts = range(0, len(batch["rewards"]), size)
    parts = [{key: value[start : start + size] for key, value in batch.items()} for start in starts]
    denominator = torch.stack([loss_denominator(part["loss_mask"], mode) for part in parts]).sum()

    gradients = torch.cat(
        [gradient_of(lambda p: loss_of(p, denominator), part) for part in parts]  # type: ignore[misc]
    )
    total = sum(loss_of(part, denominator) for part in parts)

    torch.testing.assert_close(total, loss_of(batch, None), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients, gradient_of(lambda b: loss_of(b, None), batch), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CHOOSING)
@given(batch=batches())
@quick
def test_tokens_chosen_beforehand_are_those_that_the_objective_would_choose(name: str, batch: Batch) -> None:
    settings = ObjectiveSettings(objective=name, **CHOOSING[name])
    torch.manual_seed(0)
    chosen = select_tokens(inputs_of(batch), settings)
    assert chosen is not None

    torch.manual_seed(0)
    by_itself = policy_loss(inputs_of(batch), settings)[0]
    given_to_it = policy_loss(inputs_of({**batch, "held_back": chosen}), settings)[0]

    torch.testing.assert_close(given_to_it, by_itself, rtol=0, atol=0)


def test_micro_batches_that_choose_alone_do_not_give_the_whole() -> None:
    # Holds the cases above to their purpose: without a common choice the parts differ from the whole.
    random = torch.Generator().manual_seed(1)
    old = -torch.rand(4, 6, generator=random, dtype=torch.float64) - 0.1
    logprobs = old + torch.randn(4, 6, generator=random, dtype=torch.float64) * 0.4
    advantages = torch.randn(4, 6, generator=random, dtype=torch.float64)
    mask = torch.ones(4, 6)

    def losses(rows: slice) -> Tensor:
        return m2po_loss(logprobs[rows], old[rows], advantages[rows], mask[rows], 0.12)

    assert not torch.equal(torch.cat([losses(slice(0, 2)), losses(slice(2, 4))]), losses(slice(0, 4)))


@given(batch=batches(), size=st.integers(1, 4))
@quick
def test_metrics_of_micro_batches_add_up_to_those_of_the_whole(batch: Batch, size: int) -> None:
    def metrics(part: Batch) -> dict[str, Tensor]:
        return policy_loss(inputs_of(part), ObjectiveSettings(kl_coef=0.1))[1]

    starts = range(0, len(batch["rewards"]), size)
    parts = [metrics({key: value[start : start + size] for key, value in batch.items()}) for start in starts]

    joined: dict[str, Tensor] = reduce(add_metrics, parts, {})
    whole = metrics(batch)
    assert joined.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(joined[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
@given(batch=batches(), reward=st.floats(-3, 3))
@quick
def test_equal_rewards_give_exactly_no_advantage_and_no_gradient(
    objective: str, name: str, batch: Batch, reward: float
) -> None:
    rewards = torch.full_like(batch["rewards"], reward)

    advantages = advantages_of(name, {**batch, "rewards": rewards})
    gradient = gradient_of(objective_of(objective), {**batch, "advantages": advantages})

    assert (advantages == 0).all()
    assert gradient is not None
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
@given(batch=batches())
@quick
def test_group_of_one_gets_exactly_no_advantage(name: str, batch: Batch) -> None:
    alone = batch["group_ids"].clone()
    alone[0] = 77

    assert (advantages_of(name, {**batch, "group_ids": alone})[0] == 0).all()


@pytest.mark.parametrize("name", PER_TOKEN)
@given(batch=batches())
@quick
def test_empty_mask_gives_zeros_and_no_nan(name: str, batch: Batch) -> None:
    empty = with_garbage({**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}, math.nan)

    result = PER_TOKEN[name](empty)
    gradient = gradient_of(PER_TOKEN[name], empty)

    assert torch.isfinite(result).all()
    assert gradient is None or (gradient == 0).all()
    for mode in MODES:
        assert aggregate_loss(result, empty["loss_mask"], mode, max_tokens=4) == 0  # type: ignore[arg-type]


@given(batch=batches())
@quick
def test_mismatch_metrics_ignore_garbage_and_an_empty_mask(batch: Batch) -> None:
    def metrics(batch: Batch) -> dict[str, Tensor]:
        return mismatch_metrics(batch["old_logprobs"], batch["sampler_logprobs"], batch["loss_mask"])

    dirty = with_garbage(batch, math.nan)
    empty = {**dirty, "loss_mask": torch.zeros_like(batch["loss_mask"])}

    assert metrics(dirty) == metrics(batch)
    assert all(value == 0 for value in metrics(empty).values())


@pytest.mark.parametrize("name", [f"objective {name}" for name in OBJECTIVES])
@given(batch=batches())
@quick
def test_nan_in_a_live_position_is_not_hidden(name: str, batch: Batch) -> None:
    batch["loss_mask"][0, 0] = True
    batch["logprobs"][0, 0] = math.nan

    assert PER_TOKEN[name](batch)[0, 0].isnan()


@pytest.mark.parametrize(
    ("tensor", "reported"),
    [
        ("logprobs", "logprobs"),
        ("old_logprobs", "proximal_logprobs"),
        ("sampler_logprobs", "sampler_logprobs"),
        ("ref_logprobs", "ref_logprobs"),
        ("values", "entropy"),
        ("advantages", "advantages"),
    ],
)
@given(batch=batches(), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
@quick
def test_value_that_is_not_finite_is_counted_by_the_name_of_its_tensor_where_it_is_live(
    tensor: str, reported: str, batch: Batch, bad: float
) -> None:
    batch["loss_mask"][0, 0] = True
    batch[tensor][0, 0] = bad
    if batch["loss_mask"].shape[1] > 1:
        batch["loss_mask"][0, 1] = False
        batch["advantages"][0, 1] = bad

    counts = {
        name: int(value)
        for name, value in policy_loss(inputs_of(batch), ObjectiveSettings())[1].items()
        if name.startswith("nonfinite/") and value != 0
    }

    assert counts == {f"nonfinite/{reported}": 1}
