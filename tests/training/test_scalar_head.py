"""The scalar head: the number of a sequence classifier of transformers, one gradient, learning, save and export."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from samples import make_engine, random_batch, training_config, trajectory, weights

from rayrl.errors import ModelError
from rayrl.training.batch import TrainBatch, batch_from_arrow
from rayrl.training.losses import SupervisedLoss
from rayrl.training.scalar_head import stored_head
from rayrl.training.token_columns import columns_mask, to_columns, to_flat
from rayrl.training.value_loss import ValueLoss, explained_variance, value_metrics
from rayrl.types.arrow import trajectories_to_batch


def _critic_batch(**options: Any) -> TrainBatch:
    """Returns that depend on the tokens, so that there is something to learn."""
    batch = random_batch(**options)
    live = batch.loss_mask != 0
    returns = (np.sin(batch.tokens) * live).astype(np.float32)
    return replace(batch, returns=returns, values=np.zeros_like(returns))


def _critic(folder: Path, **options: Any) -> Any:
    """An engine whose head is not the zero that it starts from."""
    engine = make_engine(folder, head="scalar", **options)
    head = dict(engine._policy.lm.named_parameters())["score.weight"]
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(head.shape, generator=generator)
    with torch.no_grad():
        if isinstance(head.data, torch.distributed.tensor.DTensor):
            values = torch.distributed.tensor.distribute_tensor(values, head.device_mesh, head.placements)
        head.copy_(values)
    return engine


def test_columns_and_flat_values_are_each_others_inverse() -> None:
    batch = random_batch()
    flat = (np.arange(len(batch.tokens), dtype=np.float32) + 1) * batch.loss_mask

    columns = to_columns(batch, flat)

    assert columns.shape == columns_mask(batch).shape == (12, int(batch.loss_counts.max()))
    assert columns[~columns_mask(batch)].eq(0).all()
    np.testing.assert_array_equal(to_flat(batch, columns), flat)


def test_a_new_head_values_everything_at_zero_and_hides_the_output_weights(llama_folder: Path) -> None:
    engine = make_engine(llama_folder, head="scalar")

    assert not engine.forward_values(random_batch()).any()
    names = weights(engine).keys()
    assert "score.weight" in names
    assert "model.embed_tokens.weight" in names
    with pytest.raises(AssertionError, match="no logprobs"):
        engine.forward_logprobs(random_batch())


def test_untied_output_weights_are_no_part_of_a_critic(untied_folder: Path) -> None:
    assert "lm_head.weight" not in weights(make_engine(untied_folder, head="scalar"))


def test_an_exported_model_scores_as_the_sequence_classifier_of_transformers(
    llama_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    engine = _critic(llama_folder)
    engine.export_hf(tmp_path / "export")
    texts = [[5, 6, 7, 8], [9, 10, 11]]
    # One more token, of any kind, is what makes the last one of the text a position that is read out.
    items = [trajectory(index, text, [2]) for index, text in enumerate(texts)]
    batch, _ = batch_from_arrow([trajectories_to_batch(items)])

    scores = engine.forward_values(batch)[batch.loss_mask != 0]

    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert theirs.config.num_labels == 1
    with torch.no_grad():
        expected = [theirs(input_ids=torch.tensor([text])).logits.item() for text in texts]
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    again = make_engine(tmp_path / "export", head="scalar")
    np.testing.assert_allclose(again.forward_values(batch), engine.forward_values(batch), rtol=1e-6, atol=1e-7)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"score.weight": torch.zeros(2, 8)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match="2 classes"):
        stored_head(tmp_path)


def test_a_critic_learns_the_returns_and_its_explained_variance_rises(llama_folder: Path) -> None:
    engine = make_engine(llama_folder, training_config(lr=0.01), head="scalar")
    batch = _critic_batch()

    before = value_metrics(batch)["critic/explained_variance"]
    for _ in range(30):
        result = engine.train_step(batch, ValueLoss(clip=None))
    after = value_metrics(replace(batch, values=engine.forward_values(batch)))["critic/explained_variance"]

    assert not result.skipped
    assert before == pytest.approx(0.0, abs=1e-6)
    assert after > 0.5


def test_explained_variance_is_zero_without_variance_and_negative_for_a_misleading_critic() -> None:
    mask = np.asarray([1, 1, 0])
    targets = np.asarray([1.0, -1.0, 5.0], dtype=np.float32)

    assert explained_variance(targets, np.ones(3, dtype=np.float32), mask) == 0.0
    assert explained_variance(targets, targets, mask) == 1.0
    assert explained_variance(-targets, targets, mask) == pytest.approx(-3.0)


def test_a_loss_of_logprobs_cannot_train_a_scalar_head(llama_folder: Path) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        make_engine(llama_folder, head="scalar").train_step(random_batch(), SupervisedLoss())


def test_a_saved_critic_comes_back_bit_equal(llama_folder: Path, tmp_path: Path) -> None:
    engine = _critic(llama_folder)
    engine.train_step(_critic_batch(), ValueLoss())
    engine.save(tmp_path / "state")
    restored = make_engine(llama_folder, head="scalar")
    restored.load(tmp_path / "state")

    for each in (engine, restored):
        each.train_step(_critic_batch(seed=3), ValueLoss())

    expected = weights(engine)
    for name, tensor in weights(restored).items():
        assert tensor.equal(expected[name]), name


def _two_steps(engine: Any, batch: TrainBatch) -> dict[str, Any]:
    gradients = engine.gradients(batch, ValueLoss())
    losses = [engine.train_step(batch, ValueLoss()).loss for _ in range(2)]
    return {
        "gradients": gradients,
        "weights": weights(engine),
        "values": torch.from_numpy(engine.forward_values(batch)),
        "losses": losses,
    }


def _assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["gradients"].keys() == expected["gradients"].keys()
    assert "score.weight" in expected["gradients"]
    for part in ("gradients", "weights"):
        for name, tensor in expected[part].items():
            torch.testing.assert_close(actual[part][name], tensor, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(actual["values"], expected["values"], rtol=1e-4, atol=1e-5)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-4)


def _rank(rank: int, world_size: int, folders: list[str]) -> list[dict[str, Any]]:
    results = []
    for folder, options in zip(
        folders, ({"num_groups": 4, "seed": 1}, {"num_groups": 1, "group_size": 1}), strict=True
    ):
        config = training_config(data=world_size, micro_batch_tokens=48, lr=1e-3, eps=1e-4)
        engine = _critic(Path(folder), config=config, rank=rank, world_size=world_size)
        results.append(_two_steps(engine, _critic_batch(**options)))
    return results


@pytest.mark.distributed
def test_two_ranks_give_the_same_value_gradient_as_one_when_one_has_nothing_to_do_too(
    llama_folder: Path, untied_folder: Path, tmp_path: Path
) -> None:
    folders = [llama_folder, untied_folder]

    ranks = run_on_ranks(_rank, 2, tmp_path, [str(folder) for folder in folders])

    for number, options in enumerate(({"num_groups": 4, "seed": 1}, {"num_groups": 1, "group_size": 1})):
        alone = _critic(folders[number], config=training_config(lr=1e-3, eps=1e-4), share_prompts=False)
        expected = _two_steps(alone, _critic_batch(**options))
        for results in ranks:
            _assert_same(results[number], expected)


def test_the_export_names_one_label(llama_folder: Path, tmp_path: Path) -> None:
    make_engine(llama_folder, head="scalar").export_hf(tmp_path / "export")

    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert len(config["id2label"]) == 1
