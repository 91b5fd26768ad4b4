"""The model in training gives the logprobs of transformers; padding, neighbours and shared prompts change nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import make_engine, random_batch, training_config, trajectory

from rayrl.errors import ModelError
from rayrl.models.loading import load_causal_lm
from rayrl.training.attention import attention as sdpa
from rayrl.training.batch import batch_from_arrow
from rayrl.training.collate import collate
from rayrl.training.logprobs import HeadSettings
from rayrl.training.losses import SupervisedLoss
from rayrl.training.policy_model import PolicyModel, can_share_prompts, check_head
from rayrl.training.rows import plan_rows
from rayrl.types.arrow import trajectories_to_batch

_CPU = torch.device("cpu")


def _reference_logprobs(folder: Path, batch: Any, temperature: float) -> np.ndarray:
    """One trajectory at a time, the whole logits, plain transformers with eager attention."""
    lm = load_causal_lm(folder, attention="eager")
    result = np.zeros(len(batch.tokens), dtype=np.float32)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))[None]
        with torch.no_grad():
            logs = torch.log_softmax(lm(input_ids=ids, use_cache=False).logits[0].float() / temperature, -1)
        result[start + 1 : end] = logs[:-1].gather(1, ids[0, 1:, None]).squeeze(1).numpy()
    return result * batch.loss_mask


@pytest.mark.parametrize("folder_name", ["llama_folder", "untied_folder"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logprobs_are_those_of_transformers(
    folder_name: str, share: bool, attention: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(folder_name)
    batch = random_batch()
    config = training_config(micro_batch_tokens=60, attention=attention)
    engine = make_engine(folder, config, temperature=0.8, share_prompts=share)

    logprobs = engine.forward_logprobs(batch)

    np.testing.assert_allclose(logprobs, _reference_logprobs(folder, batch, 0.8), rtol=1e-4, atol=1e-5)


def test_longer_rows_take_the_other_attention_and_give_the_same(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch()
    engine = make_engine(llama_folder)
    dense = engine.forward_logprobs(batch)

    monkeypatch.setattr("rayrl.training.attention.MAX_DENSE_LENGTH", 4)
    other = engine.forward_logprobs(batch)

    np.testing.assert_allclose(other, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
def test_tokens_of_a_trajectory_leave_its_neighbours_bit_equal(llama_folder: Path, share: bool) -> None:
    prompt = [2, 3, 4, 5]
    completions = [[10, 11, 12], [20, 21], [30, 31, 32, 33]]
    changed = [[10, 11, 12], [50, 51], [30, 31, 32, 33]]
    engine = make_engine(llama_folder, share_prompts=share)

    def logprobs(of: list[list[int]]) -> np.ndarray:
        items = [trajectory(0, prompt, tokens, sample_index=index) for index, tokens in enumerate(of)]
        return engine.forward_logprobs(batch_from_arrow([trajectories_to_batch(items)])[0])

    before, after = logprobs(completions), logprobs(changed)

    neighbours = [*range(4, 7), *range(17, 21)]
    assert before[neighbours].tolist() == after[neighbours].tolist()
    assert before[11:13].tolist() != after[11:13].tolist()


def test_padding_tokens_have_no_effect(llama_folder: Path) -> None:
    batch = random_batch()
    model = PolicyModel(load_causal_lm(llama_folder), HeadSettings(temperature=1.0))
    for share in (True, False):
        micro = collate(batch, plan_rows(batch, share=share, attention_cost=0.0, max_tokens=200), _CPU)
        read = torch.zeros_like(micro.input_ids, dtype=torch.bool)
        for number, row in enumerate(plan_rows(batch, share=share, attention_cost=0.0, max_tokens=200)):
            read[number, : row.length] = True
        assert not read.all()

        with torch.no_grad():
            plain, _ = model(micro)
            dirty, _ = model(replace(micro, input_ids=torch.where(read, micro.input_ids, 37)))

        assert plain.tolist() == dirty.tolist()


def test_activation_checkpointing_keeps_gradients_and_names(llama_folder: Path) -> None:
    batch = random_batch()
    plain = make_engine(llama_folder).gradients(batch, SupervisedLoss())
    saved = make_engine(llama_folder, training_config(activation_checkpointing=True)).gradients(batch, SupervisedLoss())

    assert plain.keys() == saved.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(saved[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(llama_folder: Path) -> None:
    lm: Any = load_causal_lm(llama_folder)
    model = PolicyModel(lm, HeadSettings(temperature=1.0))
    check_head(model)
    original = lm.forward

    def scaled(**options: Any) -> Any:
        output = original(**options)
        output.logits = output.logits * 2
        return output

    lm.forward = scaled
    with pytest.raises(ModelError, match="LlamaForCausalLM changes its logits"):
        check_head(model)


def _tiny(name: str) -> Any:
    import transformers

    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    extra: dict[str, dict[str, Any]] = {"Granite": {"logits_scaling": 4.0}, "Cohere": {"logit_scale": 0.5}}
    config_class = getattr(transformers, f"{name}Config")
    torch.manual_seed(1)
    return getattr(transformers, f"{name}ForCausalLM")(config_class(**(sizes | extra.get(name, {}))))


@pytest.mark.parametrize(
    "name", ["Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Phi3", "Granite", "Cohere", "GPTNeoX"]
)
def test_other_families_pass_the_check_of_their_head(name: str) -> None:
    model = PolicyModel(_tiny(name), HeadSettings(temperature=1.0))

    check_head(model)

    assert len(model.layers()) == 2


@pytest.mark.parametrize(
    ("name", "expected"), [("Qwen2", True), ("Mistral", False), ("Gemma2", False), ("GPTNeoX", True)]
)
def test_prompts_are_shared_only_without_sliding_windows(name: str, expected: bool) -> None:
    assert can_share_prompts(_tiny(name)) is expected


def test_attention_with_sinks_is_refused_by_name() -> None:
    states = torch.zeros(1, 2, 3, 4)

    with pytest.raises(ModelError, match=r"Linear uses s_aux.*training.engine.attention=sdpa"):
        sdpa(torch.nn.Linear(1, 1), states, states, states, None, s_aux=torch.zeros(2))
