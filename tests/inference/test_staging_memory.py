"""Weights that are in use where they arrived, and memory that changes sides."""

import mmap

import pytest
import torch

from rayrl.errors import EngineError
from rayrl.inference.staging_memory import StagingMemory, make_memory
from rayrl.infra.bucket_stream import copy_to_stream
from rayrl.infra.buckets import stream_offsets
from rayrl.infra.weight_manifest import WeightManifest, spec_of


def test_areas_change_sides_and_their_bytes_stay() -> None:
    memory = StagingMemory()
    first = memory.reserve(100)
    first.fill_(1)
    memory.adopt()
    second = memory.reserve(100)
    second.fill_(2)
    memory.adopt()

    third = memory.reserve(80)

    assert third.data_ptr() == first.data_ptr() and third.eq(1).all()
    assert not memory.holds([second[:10]])
    assert memory.holds([third[:10], torch.empty(0)])
    assert not memory.holds([third[:10], torch.ones(1)])


def test_memory_that_is_too_small_is_made_anew_and_may_be_empty() -> None:
    memory = StagingMemory()

    assert memory.reserve(0).numel() == 0
    assert memory.reserve(10).numel() == 10
    assert memory.reserve(mmap.PAGESIZE + 1).numel() == mmap.PAGESIZE + 1
    assert make_memory(5).eq(0).all()


def manifest_of(weights):
    specs = tuple(spec_of(name, tensor) for name, tensor in weights.items())
    return WeightManifest(version=1, tensors=specs, bucket_bytes=4096)


async def staged(engine, weights):
    manifest = manifest_of(weights)
    _, num_bytes = stream_offsets(manifest.tensors)
    memory = await engine.staging_memory(num_bytes)
    return copy_to_stream(manifest, weights, memory[:num_bytes])


@pytest.mark.asyncio(loop_scope="session")
async def test_weights_are_used_where_they_were_staged_and_copied_from_elsewhere(make_engine) -> None:
    engine = await make_engine("embedded")
    before = await engine.complete(temperature=0, max_new_tokens=8, min_new_tokens=8)
    addresses = []
    for version in range(1, 5):
        changed = {name: (version % 2 + 1) * item.detach() for name, item in engine.weights.items()}
        there = await staged(engine.engine, changed)
        await engine.engine.load(version, there)
        held = engine.model[0].model
        for name, parameter in held.named_parameters():
            assert parameter.data_ptr() == there[name].data_ptr() and parameter.equal(changed[name])
        assert held.lm_head.weight.data_ptr() == held.model.embed_tokens.weight.data_ptr(), "still tied"
        addresses.append(there["model.norm.weight"].data_ptr())

    await engine.engine.load(5, engine.weights)

    assert addresses[0] == addresses[2] != addresses[1] == addresses[3]
    assert held.model.norm.weight.data_ptr() == addresses[3], "copied over those in use"
    assert (await engine.complete(temperature=0, max_new_tokens=8, min_new_tokens=8)).tokens == before.tokens


@pytest.mark.asyncio(loop_scope="session")
async def test_old_weights_stay_in_use_when_staged_ones_do_not_fit(make_engine) -> None:
    engine = await make_engine("embedded")
    await engine.engine.load(1, await staged(engine.engine, dict(engine.weights)))
    before = await engine.complete(temperature=0, max_new_tokens=8, min_new_tokens=8)
    fewer = {name: 0 * item.detach() for name, item in engine.weights.items() if name != "model.norm.weight"}

    with pytest.raises(EngineError, match=r"lack 'model\.norm\.weight'"):
        await engine.engine.load(2, await staged(engine.engine, fewer))

    assert (await engine.complete(temperature=0, max_new_tokens=8, min_new_tokens=8)).tokens == before.tokens
    assert (await engine.status()).version == 1
