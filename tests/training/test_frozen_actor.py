"""The actor of a frozen model, without Ray: scores in batches, logprobs as one more column."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import make_engine, random_groups, trajectory

from rayrl.config.frozen import FrozenModelSection
from rayrl.errors import ModelError
from rayrl.models.loading import load_causal_lm
from rayrl.training.batch import batch_from_arrow
from rayrl.training.distillation import distillation_metrics
from rayrl.training.frozen_actor import TEACHER_COLUMN, FrozenModelActor, FrozenModelSettings
from rayrl.training.scalar_head import HeadKind
from rayrl.types.arrow import trajectories_to_batch
from rayrl.types.trajectory import FailureRecord

pytestmark = pytest.mark.asyncio


def _actor(folder: Path, head: HeadKind) -> FrozenModelActor:
    return FrozenModelActor(FrozenModelSettings(name="frozen", model=FrozenModelSection(path=str(folder)), head=head))


@pytest.fixture(scope="module")
def scoring_folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a reward model whose head is not zero."""
    engine = make_engine(llama_folder, head="scalar")
    with torch.no_grad():
        engine._policy.lm.score.weight.copy_(torch.linspace(-1, 1, 32)[None])
    folder = tmp_path_factory.mktemp("scoring") / "export"
    engine.export_hf(folder)
    return folder


async def test_texts_that_wait_together_get_the_scores_that_each_gets_alone(scoring_folder: Path) -> None:
    actor = _actor(scoring_folder, "scalar")
    texts = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]

    together = await asyncio.gather(*(actor.score(text) for text in texts))
    alone = [await actor.score(text) for text in texts]

    assert together == pytest.approx(alone, rel=1e-5)
    assert len(set(together)) == 3
    assert await actor.status() == {"texts": 6}


async def test_a_score_is_that_of_the_last_token_in_transformers(scoring_folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    score = await _actor(scoring_folder, "scalar").score([5, 6, 7])

    theirs = AutoModelForSequenceClassification.from_pretrained(scoring_folder, dtype=torch.float32)
    with torch.no_grad():
        assert score == pytest.approx(theirs(input_ids=torch.tensor([[5, 6, 7]])).logits.item(), rel=1e-4)


async def test_a_folder_without_a_head_is_refused(llama_folder: Path) -> None:
    with pytest.raises(ModelError, match="no scalar head"):
        _actor(llama_folder, "scalar")


async def test_the_teacher_adds_its_logprobs_to_usable_rows_and_nothing_to_failed_ones(llama_folder: Path) -> None:
    failure = FailureRecord(kind="timeout", message="late")
    first = trajectories_to_batch([trajectory(0, [5, 6], [7, 8]), trajectory(0, [5, 6], [9], failure=failure)])
    second = trajectories_to_batch([trajectory(1, [3], [4])])

    count, *annotated = await _actor(llama_folder, "policy").annotate(first, second)

    assert count == 4, "failed rows count too: the number is only for messages"
    assert [len(row) for row in annotated[0][TEACHER_COLUMN].to_pylist()] == [4, 0]
    batch, num_failed = batch_from_arrow(annotated)
    assert num_failed == 1
    assert batch.teacher_logprobs is not None
    lm = load_causal_lm(llama_folder)
    with torch.no_grad():
        expected = torch.log_softmax(lm(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, 1:3].float(), -1)
    np.testing.assert_allclose(batch.teacher_logprobs[2:4], expected[[0, 1], [7, 8]].numpy(), rtol=1e-4, atol=1e-5)
    assert not batch.teacher_logprobs[batch.loss_mask == 0].any()


async def test_the_distance_of_a_student_from_itself_is_zero(llama_folder: Path) -> None:
    plain, _ = batch_from_arrow(random_groups())
    assert distillation_metrics(plain) == {}

    _, *annotated = await _actor(llama_folder, "policy").annotate(*random_groups())
    batch, _ = batch_from_arrow(annotated)
    assert batch.teacher_logprobs is not None
    same = replace(batch, logprobs=batch.teacher_logprobs)

    assert distillation_metrics(same)["distillation/reverse_kl"] == 0.0
    assert distillation_metrics(batch)["distillation/reverse_kl"] != 0.0
