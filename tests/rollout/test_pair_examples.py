"""Pairs as trajectories: both answers of one prompt, with the loss on the answer or on one token after it."""

import pytest
from fakes import CharTokenizer

from rayrl.config.dataset import ArithmeticDataset
from rayrl.datasets.arithmetic import ArithmeticSource
from rayrl.errors import DatasetError
from rayrl.rollout.pair_examples import PairEncoding, encode_pair
from rayrl.rollout.single_turn import PromptTooLong
from rayrl.types.prompt import Prompt, PromptId
from rayrl.types.trajectory import check_trajectory


def _prompt(**metadata: object) -> Prompt:
    return Prompt(id=PromptId(dataset="d", epoch=0, ordinal=3), text="3+4=", answer="7", metadata=metadata)


def _encoding(loss_on: str = "answer", field: str = "rejected") -> PairEncoding:
    return PairEncoding(prompt_format="text", system_prompt=None, rejected_field=field, loss_on=loss_on)  # type: ignore[arg-type]


def test_both_answers_follow_the_same_prompt_and_carry_the_loss() -> None:
    tokenizer = CharTokenizer()

    chosen, rejected = encode_pair(_prompt(rejected="12"), tokenizer, _encoding(), 32)

    for example, answer, index in ((chosen, "7", 0), (rejected, "12", 1)):
        check_trajectory(example)
        expected = [*tokenizer.encode("3+4="), *tokenizer.encode(answer), tokenizer.eos_token_ids[0]]
        assert list(example.tokens) == expected
        assert sum(example.loss_mask) == len(answer) + 1
        assert example.sample_index == index


def test_for_a_reward_model_one_token_behind_the_text_carries_the_loss() -> None:
    chosen, _ = encode_pair(_prompt(rejected="12"), CharTokenizer(), _encoding("end"), 32)

    check_trajectory(chosen)
    assert len(chosen.tokens) == len("3+4=7") + 2
    assert chosen.loss_mask == (0,) * (len(chosen.tokens) - 1) + (1,)


def test_a_field_that_is_missing_or_no_text_is_named() -> None:
    with pytest.raises(DatasetError, match="did you mean 'rejected'"):
        encode_pair(_prompt(rejected="12"), CharTokenizer(), _encoding(field="rejecte"), 32)
    with pytest.raises(DatasetError, match="no text in field 'rejected'"):
        encode_pair(_prompt(rejected=["12"]), CharTokenizer(), _encoding(), 32)


def test_a_pair_beyond_the_context_is_refused() -> None:
    with pytest.raises(PromptTooLong):
        encode_pair(_prompt(rejected="1234567"), CharTokenizer(), _encoding(), 10)


def test_wrong_sums_are_near_the_right_one_and_always_the_same() -> None:
    config = ArithmeticDataset(type="arithmetic", with_rejected=True)
    rows = [ArithmeticSource(config).row(index) for index in range(200)]

    for row in rows:
        assert row.answer is not None
        assert 1 <= abs(int(row.metadata["rejected"]) - int(row.answer)) <= 5
        assert int(row.metadata["rejected"]) >= 0
    again = ArithmeticSource(config)
    assert [again.row(index).metadata for index in range(200)] == [row.metadata for row in rows]
    assert ArithmeticSource(ArithmeticDataset(type="arithmetic")).row(0).metadata == {}
