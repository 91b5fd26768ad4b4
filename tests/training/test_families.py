"""Every family trains: logprobs of plain transformers and of the embedded engine, one step, names to publish."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, write_family
from samples import make_engine, random_batch, trajectory, weights

from rayrl.inference.embedded import EmbeddedModel, LoadedModel
from rayrl.inference.scheduler import PromptGroup
from rayrl.inference.scheduler import Sequence as RunningSequence
from rayrl.inference.slot_attention import ATTENTION_NAME, register_slot_attention
from rayrl.models.loading import load_causal_lm
from rayrl.training.batch import TrainBatch, batch_from_arrow
from rayrl.training.losses import SupervisedLoss
from rayrl.types.arrow import trajectories_to_batch
from rayrl.types.sampling import GenerationRequest, SamplingParams
from rayrl.types.trajectory import Trajectory

_CASES = [*[(name, False, None) for name in FAMILIES], ("Qwen2", True, None), ("Llama", True, None)]
_CASES += [("Mistral", False, 5), ("Qwen2", False, 5), ("Gemma2", True, 5), ("Mixtral", False, 5)]


def _logprobs_alone(folder: Path, batch: TrainBatch) -> np.ndarray:
    """One trajectory at a time, the whole logits, plain transformers with eager attention."""
    lm = load_causal_lm(folder, attention="eager")
    result = np.zeros(len(batch.tokens), dtype=np.float32)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))[None]
        with torch.no_grad():
            logs = torch.log_softmax(lm(input_ids=ids, use_cache=False).logits[0].float(), -1)
        result[start + 1 : end] = logs[:-1].gather(1, ids[0, 1:, None]).squeeze(1).numpy()
    return result * batch.loss_mask


@pytest.mark.parametrize(
    ("name", "tied", "window"),
    _CASES,
    ids=[f"{name}{'-tied' if tied else ''}{'-window' if window else ''}" for name, tied, window in _CASES],
)
def test_a_family_gives_its_own_logprobs_and_learns(name: str, tied: bool, window: int | None, tmp_path: Path) -> None:
    folder = write_family(tmp_path / name, name, tied=tied, window=window)
    engine, batch = make_engine(folder), random_batch(num_groups=2, seed=8)
    expected = _logprobs_alone(folder, batch)

    np.testing.assert_allclose(engine.forward_logprobs(batch), expected, rtol=1e-3, atol=1e-4)
    before = weights(engine)
    first = engine.train_step(batch, SupervisedLoss())
    second = engine.train_step(batch, SupervisedLoss())

    assert (first.skipped, second.skipped) == (False, False)
    assert second.loss < first.loss
    assert all(not tensor.equal(before[name]) for name, tensor in weights(engine).items()), "every weight is trained"
    assert list(before) == [key for key, _ in load_causal_lm(folder).named_parameters()]


def _embedded(folder: Path) -> EmbeddedModel:
    """The embedded engine's model, without the tokenizer that these folders lack."""
    register_slot_attention()
    model = EmbeddedModel(
        lambda: LoadedModel(
            model=load_causal_lm(folder, attention=ATTENTION_NAME), max_context=32, eos_token_ids=(), decode=None
        ),
        max_batch_size=4,
    )
    model.open()
    return model


def _sample(model: EmbeddedModel, num_steps: int) -> list[Trajectory]:
    """Four completions of one prompt, with the logprobs that the engine reports."""
    prompt = (5, 6, 7)
    params = SamplingParams(max_new_tokens=num_steps, stop_token_ids=())
    rows = [
        RunningSequence(
            request=GenerationRequest(request_id=str(row), prompt_tokens=prompt, params=params),
            seed=row,
            stop_strings=None,
        )
        for row in range(4)
    ]
    groups = [PromptGroup(prompt_tokens=prompt, num_members=4)]
    for _ in range(num_steps):
        tokens, logprobs = model.step(rows, groups)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
        groups = []
    sampled = [trajectory(0, list(prompt), row.tokens, sample_index=index) for index, row in enumerate(rows)]
    return [
        replace(item, logprobs=(0.0,) * len(prompt) + tuple(row.logprobs))
        for item, row in zip(sampled, rows, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "tied", "window"),
    _CASES,
    ids=[f"{name}{'-tied' if tied else ''}{'-window' if window else ''}" for name, tied, window in _CASES],
)
def test_the_embedded_engine_takes_the_published_weights_and_reports_the_same_logprobs(
    name: str, tied: bool, window: int | None, tmp_path: Path
) -> None:
    folder = write_family(tmp_path / name, name, tied=tied, window=window)
    engine = make_engine(folder)
    engine.train_step(random_batch(num_groups=2, seed=8), SupervisedLoss())
    served = _embedded(folder)

    served.check_weights([(spec.name, spec.shape, spec.dtype) for spec in engine.weight_specs("float32")])
    served.load(dict(engine.weight_tensors("float32")))
    batch, _ = batch_from_arrow([trajectories_to_batch(_sample(served, 12))])

    difference = np.abs(engine.forward_logprobs(batch) - batch.logprobs)[batch.loss_mask != 0]
    assert difference.mean() < 1e-3
