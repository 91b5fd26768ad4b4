"""The engine actor as a plain class: merged streams, and publications in order, out of order and failing."""

import asyncio
from dataclasses import replace
from threading import Event

import pytest
import pytest_asyncio
import torch

from rayrl.config.inference import InferenceConfig, ScriptedEngine, TransformersEngine
from rayrl.config.model import ModelConfig
from rayrl.config.transfer import TransferConfig
from rayrl.errors import DeadlineExceeded, EngineError, TransferError
from rayrl.inference.engine import EngineBusy
from rayrl.inference.engine_actor import EngineActor
from rayrl.inference.lifecycle import EngineState
from rayrl.inference.settings import EngineSettings
from rayrl.infra.collective_group import CollectiveGroup, host_rendezvous
from rayrl.infra.publication import TRANSFER_GROUP
from rayrl.infra.route_table import make_stored_route
from rayrl.infra.weight_route import ReceivedWeights
from rayrl.infra.weight_transfer import WeightManifest, send_weights, spec_of
from rayrl.types.sampling import Chunk, GenerationRequest, RequestFailure, SamplingParams, join_chunks

pytestmark = pytest.mark.asyncio
TIMEOUT_S = 30.0


def settings(folder, engine=None, **inference):
    engine = engine or TransformersEngine(type="transformers", max_batch_size=4)
    return EngineSettings(
        model=ModelConfig(path=str(folder)),
        inference=InferenceConfig(engine=engine, **inference),
        transfer=TransferConfig(),
        seed=1,
    )


def request(request_id, prompt=(2, 3, 4), **params):
    return GenerationRequest(
        request_id=request_id, prompt_tokens=prompt, params=SamplingParams(**{"max_new_tokens": 5, **params})
    )


def manifest_of(tensors, version):
    return WeightManifest(
        version=version, tensors=tuple(spec_of(name, tensor) for name, tensor in tensors.items()), bucket_bytes=4096
    )


async def collect(actor, requests):
    """All items of one call, by request."""
    items = {}
    async for batch in actor.generate(requests):
        assert batch, "no empty messages"
        for item in batch:
            items.setdefault(item.request_id, []).append(item)
    return items


class Trainer:
    """Rank 0 of the transfer group, for engines in this process."""

    def __init__(self, actors):
        self.actors = actors
        self.epoch = 0
        self.group = None

    async def connect(self):
        self.epoch += 1
        hosted = await asyncio.to_thread(host_rendezvous, "127.0.0.1", TIMEOUT_S)
        members = ("train-0", *(actor.name for actor in self.actors))
        join = asyncio.to_thread(
            CollectiveGroup.join,
            hosted.address,
            name=TRANSFER_GROUP,
            epoch=self.epoch,
            rank=0,
            members=members,
            backend="gloo",
            timeout_s=TIMEOUT_S,
            hosted=hosted,
        )
        self.group, *_ = await asyncio.gather(
            join,
            *(
                actor.join_transfer(hosted.address, self.epoch, rank, members, "gloo", TIMEOUT_S)
                for rank, actor in enumerate(self.actors, start=1)
            ),
        )

    async def transfer(self, manifest, tensors):
        send = asyncio.to_thread(send_weights, self.group, manifest, tensors.items())
        return await asyncio.gather(send, *(actor.receive(manifest) for actor in self.actors))

    async def publish(self, tensors, version):
        manifest = manifest_of(tensors, version)
        for actor in self.actors:
            await actor.prepare(manifest)
        sent, *acks = await self.transfer(manifest, tensors)
        for actor in self.actors:
            await actor.commit(version)
        return sent, acks


@pytest.fixture
def weights(reference):
    return {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}


@pytest_asyncio.fixture
async def actor(tiny_model):
    actor = EngineActor(0, settings(tiny_model))
    await actor.ready()
    yield actor
    await actor.close()


@pytest_asyncio.fixture
async def trainer(actor):
    trainer = Trainer([actor])
    await trainer.connect()
    yield trainer
    trainer.group.close()


async def test_ready_says_where_the_actor_runs(actor):
    place = await actor.ready()

    assert set(place) == {"node", "host", "pid"}


async def test_published_weights_are_acknowledged_and_used(actor, trainer, weights):
    sent, acks = await trainer.publish(weights, 0)

    assert [(ack.engine, ack.version, ack.digests) for ack in acks] == [("inference-0", 0, sent)]
    items = await collect(actor, [request("a"), request("b", (5,))])
    assert {join_chunks(chunks).spans[0].version for chunks in items.values()} == {0}
    assert (await actor.status()).version == 0


async def test_two_engines_receive_the_same_and_sample_differently_without_seeds(tiny_model, weights):
    actors = [EngineActor(index, settings(tiny_model)) for index in range(2)]
    trainer = Trainer(actors)
    for actor in actors:
        await actor.ready()
    await trainer.connect()

    await trainer.publish(weights, 0)

    first, second = [(await collect(actor, [request("a", temperature=2.0)]))["a"] for actor in actors]
    assert join_chunks(first).tokens != join_chunks(second).tokens
    greedy = [(await collect(actor, [request("g", temperature=0)]))["g"] for actor in actors]
    assert join_chunks(greedy[0]).tokens == join_chunks(greedy[1]).tokens
    trainer.group.close()
    for actor in actors:
        await actor.close()


async def test_requests_that_cannot_be_served_become_failures_beside_those_that_can(tiny_model):
    actor = EngineActor(0, settings(tiny_model, ScriptedEngine(type="scripted"), max_queued_requests=2))
    await actor.ready()
    await actor._engine.load(0, {})
    await actor._engine.pause("keep")

    stream = actor.generate([request("refused", ()), request("a"), request("b"), request("busy")])
    first = await anext(stream)
    await actor._engine.resume()
    rest = [item for batch in [batch async for batch in stream] for item in batch]

    assert {item.request_id: item.retry for item in first} == {"refused": False, "busy": True}
    assert all(isinstance(item, RequestFailure) for item in first)
    assert {item.request_id: item.tokens for item in rest} == {"a": (1,), "b": (1,)}
    await actor.close()


async def test_stream_raises_when_the_engine_fails(actor):
    with pytest.raises(EngineError, match="weights were never pushed"):
        await collect(actor, [request("a"), request("b")])


class ForgetfulEngine:
    """Ends requests without a reason."""

    async def generate(self, request):
        yield Chunk(request_id=request.request_id, tokens=(3,), logprobs=(-1.0,), version=0)


async def test_stream_raises_when_a_request_ends_without_a_reason(tiny_model):
    actor = EngineActor(0, settings(tiny_model))
    actor._engine = ForgetfulEngine()

    with pytest.raises(EngineError, match="inference-0 gave no reason for the end of request 'a'"):
        await asyncio.wait_for(collect(actor, [request("a")]), TIMEOUT_S)


class FullEngine:
    """Has no room for so many requests."""

    def __init__(self, num_refused):
        self.num_refused = num_refused

    async def generate(self, request):
        self.num_refused -= 1
        if self.num_refused >= 0:
            raise EngineBusy("engine full has 8 requests in flight")
        yield Chunk(request_id=request.request_id, tokens=(3,), logprobs=(-1.0,), version=0, finish_reason="length")


async def test_probe_is_answered_when_the_queue_was_full_at_first(tiny_model):
    actor = EngineActor(0, settings(tiny_model))
    actor._engine = FullEngine(2)

    assert (await actor.sample_probe(request("probe"), TIMEOUT_S)).tokens == (3,)

    assert actor._engine.num_refused == -1


async def test_probe_is_given_up_when_the_queue_stays_full(tiny_model):
    actor = EngineActor(0, settings(tiny_model))
    actor._engine = FullEngine(1)

    with pytest.raises(DeadlineExceeded, match="no room for probe in 0 s: engine full has 8 requests"):
        await actor.sample_probe(request("probe"), 0.0)


async def test_requests_are_aborted_when_the_reader_of_the_stream_leaves(actor, trainer, weights):
    await trainer.publish(weights, 0)
    await actor._engine.pause("keep")
    stream = actor.generate([request("a"), request("b")])
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)

    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await actor.abort(["nobody"])

    status = await actor.status()
    assert (status.num_running, status.num_waiting, status.total_requests) == (0, 0, 2)


async def test_abort_ends_the_named_requests(actor, trainer, weights):
    await trainer.publish(weights, 0)
    await actor._engine.pause("keep")
    reader = asyncio.ensure_future(collect(actor, [request("a"), request("b")]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    await actor.abort(["b", "unknown"])
    await actor._engine.resume()

    items = await reader
    assert items["b"][-1].finish_reason == "abort"
    assert items["a"][-1].finish_reason != "abort"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "lack 'model.norm.weight'"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "'extra' is unknown"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(5)}), r"shape \(5,\)"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(32).bfloat16()}), "bfloat16.*model.dtype"),
    ],
)
async def test_prepare_names_the_first_difference_between_manifest_and_model(actor, weights, change, message):
    change(weights)

    with pytest.raises(EngineError, match=message):
        await actor.prepare(manifest_of(weights, 1))

    with pytest.raises(EngineError, match="is IDLE"):
        await actor.commit(1)


async def test_calls_out_of_order_name_the_state(actor, trainer, weights):
    manifest = manifest_of(weights, 1)

    with pytest.raises(EngineError, match=r"receive version 1: it is IDLE .* PREPARED"):
        await actor.receive(manifest)
    await actor.prepare(manifest)
    with pytest.raises(EngineError, match=r"prepare version 1: it is PREPARED .* with version 1 .* IDLE"):
        await actor.prepare(manifest)
    with pytest.raises(EngineError, match=r"receive version 2: it is PREPARED"):
        await actor.receive(replace(manifest, version=2))
    with pytest.raises(EngineError, match="another manifest"):
        await actor.receive(replace(manifest, bucket_bytes=8192))
    with pytest.raises(EngineError, match=r"commit version 1: it is PREPARED .* STAGED"):
        await actor.commit(1)
    await trainer.transfer(manifest, weights)
    with pytest.raises(EngineError, match=r"commit version 2: it is STAGED .* with version 1"):
        await actor.commit(2)
    await actor.commit(1)
    with pytest.raises(EngineError, match="commit version 1: it is IDLE"):
        await actor.commit(1)


async def test_receive_is_refused_when_no_group_was_joined(actor, weights):
    await actor.prepare(manifest_of(weights, 1))

    with pytest.raises(TransferError, match="none was joined"):
        await actor.receive(manifest_of(weights, 1))


async def test_discarded_version_leaves_the_old_weights_and_the_next_one_is_taken(actor, trainer, weights):
    await trainer.publish(weights, 0)
    before = join_chunks((await collect(actor, [request("a", temperature=0)]))["a"])
    other = {name: tensor * 0 for name, tensor in weights.items()}
    manifest = manifest_of(other, 1)
    await actor.prepare(manifest)
    await trainer.transfer(manifest, other)

    await actor.discard(1)
    await actor.discard(1)
    await actor.discard(7)

    with pytest.raises(EngineError, match="is IDLE"):
        await actor.commit(1)
    after = join_chunks((await collect(actor, [request("b", temperature=0)]))["b"])
    assert after.tokens == before.tokens and (await actor.status()).version == 0
    await trainer.publish(other, 2)
    assert (await actor.status()).version == 2


async def test_transfer_that_breaks_is_repeated_under_the_next_epoch(actor, trainer, weights):
    await trainer.publish(weights, 0)
    manifest = manifest_of(weights, 1)
    await actor.prepare(manifest)
    trainer.group.close()

    with pytest.raises((TransferError, TimeoutError)):
        await actor_receive_with_closed_sender(actor, manifest)
    await actor.discard(1)
    await trainer.connect()
    await trainer.publish(weights, 1)

    assert (await actor.status()).version == 1


async def actor_receive_with_closed_sender(actor, manifest):
    # The sender has left: the agreement at the start of a transfer would wait for its deadline.
    actor._route._group.timeout_s = 0.1
    await actor.receive(manifest)


class Group:
    """Of one epoch; says whether it was left."""

    def __init__(self, epoch):
        self.label = f"epoch {epoch}"
        self.is_closed = False

    def close(self):
        self.is_closed = True


async def test_group_of_an_earlier_epoch_is_left_when_its_join_ends_late(actor, monkeypatch):
    groups, may_end = {1: Group(1), 2: Group(2)}, Event()

    def join(address, *, epoch, **_):
        assert epoch == 2 or may_end.wait(TIMEOUT_S)
        return groups[epoch]

    monkeypatch.setattr(CollectiveGroup, "join", join)
    late = asyncio.create_task(actor.join_transfer(None, 1, 1, (), "gloo", TIMEOUT_S))
    await asyncio.sleep(0)
    await actor.join_transfer(None, 2, 1, (), "gloo", TIMEOUT_S)
    may_end.set()

    with pytest.raises(TransferError, match="epoch 1: inference-0 was told to join epoch 2 meanwhile"):
        await late

    assert (groups[1].is_closed, groups[2].is_closed) == (True, False)
    await actor.close()
    assert groups[2].is_closed


async def test_engine_is_closed_when_its_group_cannot_be_left(actor):
    class Stuck:
        def close(self):
            raise RuntimeError("no connection")

    actor._route = Stuck()

    with pytest.raises(RuntimeError, match="no connection"):
        await actor.close()

    assert (await actor.status()).state is EngineState.CLOSED


class SlowMemory:
    """Engine whose memory is there at once, but for the first who asks."""

    def __init__(self):
        self.memory = torch.zeros(1024, dtype=torch.uint8)
        self.may_answer = asyncio.Event()
        self.num_asked = 0

    async def check_weights(self, specs):
        pass

    async def staging_memory(self, num_bytes):
        self.num_asked += 1
        if self.num_asked == 1:
            await self.may_answer.wait()
        return self.memory


class Arriving:
    """Route on which everything is there; keeps who was given memory."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.given = []

    def receive(self, manifest, parcels, timeout_s, memory=None):
        self.given.append((manifest.version, memory is not None))
        return ReceivedWeights(tensors=self.tensors, digests=())


async def test_two_transfers_never_share_memory_when_the_first_was_given_up_before_it_began(tiny_model):
    tensors = {"w": torch.ones(4)}
    actor = EngineActor(0, settings(tiny_model))
    actor._engine, actor._route = SlowMemory(), Arriving(tensors)
    await actor.prepare(manifest_of(tensors, 1))
    given_up = asyncio.create_task(actor.receive(manifest_of(tensors, 1)))
    await asyncio.sleep(0)

    await actor.discard(1)
    await actor.prepare(manifest_of(tensors, 2))
    await actor.receive(manifest_of(tensors, 2))
    actor._engine.may_answer.set()
    with pytest.raises(EngineError, match="discard version 1 while it arrived"):
        await given_up
    await actor.discard(2)
    await actor.prepare(manifest_of(tensors, 3))
    await actor.receive(manifest_of(tensors, 3))

    assert actor._route.given == [(2, False), (1, True), (3, True)]


async def test_engine_runs_on_when_a_commit_cannot_load(actor, trainer, weights):
    await trainer.publish(weights, 0)
    manifest = manifest_of(weights, 1)
    await actor.prepare(manifest)
    await trainer.transfer(manifest, weights)
    actor._staging.staged(1).pop("model.norm.weight")

    with pytest.raises(EngineError, match=r"lack 'model\.norm\.weight'"):
        await actor.commit(1)

    status = await actor.status()
    assert (status.state, status.version) == (EngineState.RUNNING, 0)
    assert (await collect(actor, [request("a")]))["a"]


@pytest.mark.parametrize("damaged", [False, True])
async def test_stored_version_is_used_and_a_damaged_one_is_refused(tiny_model, weights, tmp_path, damaged):
    transfer = TransferConfig(backend="disk", folder=str(tmp_path))
    actor = EngineActor(0, replace(settings(tiny_model), transfer=transfer))
    await actor.ready()
    manifest = manifest_of(weights, 1)
    sent = make_stored_route(transfer, tiny_model).send(manifest, weights.items())
    if damaged:
        path = tmp_path / "version_00000001" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-4] + b"\x01\x02\x03\x04")

    await actor.prepare(manifest)
    ack = await actor.receive(manifest, [sent.parcel], TIMEOUT_S)

    assert (ack.digests != sent.digests) == damaged
    if damaged:
        with pytest.raises(EngineError, match="commit version 1: it is IDLE"):
            await actor.commit(1)
    else:
        await actor.commit(1)
    assert (await actor.status()).version == (-1 if damaged else 1)
    await actor.close()
