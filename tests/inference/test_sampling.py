"""Sampling as pure functions: uniforms, frequencies, filters."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.inference.sampling import SamplingTable, keep_likely, sample, uniforms


def table(num_rows, greedy=False):
    return SamplingTable(
        temperature=torch.ones(num_rows, 1),
        greedy=torch.full((num_rows,), greedy),
        any_greedy=greedy,
        filtered_rows=torch.zeros(0, dtype=torch.int64),
        top_k=torch.zeros(0, 1, dtype=torch.int64),
        top_p=torch.zeros(0, 1),
    )


def test_uniforms_depend_on_seed_and_position_only():
    seeds = np.array([1, 2, 3], dtype=np.uint64)
    positions = np.array([5, 6, 7], dtype=np.int64)

    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[index : index + 1], positions[index : index + 1])[0] for index in range(3)]

    assert together.tolist() == alone


def test_uniforms_are_spread_evenly_over_neighbouring_seeds_and_positions():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.int64))

    values = uniforms(seeds.ravel(), positions.ravel())

    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    # 2000 expected in each of 20 bins; 5 standard deviations.
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000 * 0.95)
    grid = values.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03
    assert values.min() >= 0 and values.max() < 1


def test_frequencies_are_the_probabilities():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    num_rows = 20_000
    scores = probs.log().expand(num_rows, -1).clone()
    uniform = torch.from_numpy(uniforms(np.arange(num_rows, dtype=np.uint64), np.zeros(num_rows, dtype=np.int64)))

    tokens, logprobs = sample(scores, table(num_rows), uniform)

    frequencies = torch.bincount(tokens, minlength=5) / num_rows
    torch.testing.assert_close(frequencies, probs, rtol=0, atol=0.02)
    assert frequencies[1] == 0
    torch.testing.assert_close(logprobs, probs[tokens].log(), rtol=0, atol=1e-6)


@settings(deadline=None)
@given(
    st.lists(st.floats(-50, 50), min_size=2, max_size=30),
    st.sampled_from([0.0, 0.5, 1 - 2.0**-24]),
    st.integers(0, 29),
)
def test_excluded_tokens_are_never_sampled(scores, uniform, excluded):
    row = torch.tensor([scores])
    row[0, excluded % len(scores)] = -torch.inf

    tokens, logprobs = sample(row.clone(), table(1), torch.tensor([uniform]))

    assert tokens.item() != excluded % len(scores)
    assert torch.isfinite(logprobs).all()


def test_frequencies_are_the_probabilities_when_the_vocabulary_has_many_blocks():
    num_rows, vocab_size = 20_000, 1000
    probs = torch.zeros(vocab_size)
    likely = torch.tensor([0, 255, 256, 700, 999])
    probs[likely] = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    uniform = torch.from_numpy(uniforms(np.arange(num_rows, dtype=np.uint64), np.ones(num_rows, dtype=np.int64)))

    tokens, logprobs = sample(probs.log().expand(num_rows, -1).clone(), table(num_rows), uniform)

    frequencies = torch.bincount(tokens, minlength=vocab_size) / num_rows
    torch.testing.assert_close(frequencies, probs, rtol=0, atol=0.02)
    assert set(tokens.tolist()) == set(likely.tolist())
    torch.testing.assert_close(logprobs, probs[tokens].log(), rtol=0, atol=1e-6)


@settings(deadline=None)
@given(st.integers(1, 700), st.floats(0, 1 - 2.0**-24, width=32), st.integers(0, 2**32))
def test_drawn_token_is_that_of_the_cumulative_sum_of_the_whole_vocabulary(vocab_size, uniform, seed):
    scores = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed))
    cdf = scores.double().softmax(-1).cumsum(-1)[0]

    token = sample(scores.clone(), table(1), torch.tensor([uniform]))[0].item()

    assert cdf[token] >= uniform - 1e-5
    assert token == 0 or cdf[token - 1] <= uniform + 1e-5


def test_row_without_a_distribution_has_a_logprob_that_is_not_finite():
    scores = torch.tensor([[0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf], [0.0, 1.0]])

    _, logprobs = sample(scores, table(4), torch.full((4,), 0.5))

    assert torch.isfinite(logprobs).tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3]),
        (2, 1.0, [0, 2]),
        (9, 1.0, [0, 1, 2, 3]),
        (0, 0.4, [2]),
        (0, 0.5, [2]),
        (0, 0.6, [0, 2]),
        (0, 1e-9, [2]),
        # Top-p counts mass among what top-k left: 0.5 / 0.8 = 0.625.
        (2, 0.6, [2]),
        (2, 0.63, [0, 2]),
    ],
)
def test_likely_tokens_are_kept(top_k, top_p, kept):
    probs = torch.tensor([[0.3, 0.15, 0.5, 0.05]])

    filtered = keep_likely(probs.log(), torch.tensor([[top_k]]), torch.tensor([[top_p]]))

    assert torch.isfinite(filtered[0]).nonzero().flatten().tolist() == kept


def test_lower_ids_are_kept_when_scores_are_equal():
    filtered = keep_likely(torch.zeros(1, 5), torch.tensor([[2]]), torch.tensor([[1.0]]))

    assert torch.isfinite(filtered[0]).tolist() == [True, True, False, False, False]
