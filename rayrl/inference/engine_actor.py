"""The inference engine actor: a thin shell over an engine; made an actor where it is spawned.

    rollout workers --generate(requests)--> tasks, one per request --> one queue --> lists of chunks, as few as possible
    driver --prepare, receive, commit/discard--> staging --load--> engine

- A reader of `generate` waits on the queue of its call; the tasks fill it, or the failure of the engine does.
- `receive` waits in a thread for the trainer; the group's timeout ends it. Generation goes on meanwhile.
- `commit` waits for the engine to load between two steps; the engine pauses only for as long as that takes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrl.errors import DeadlineExceeded, EngineError, TransferError
from rayrl.inference.engine import EngineBusy, EngineStatus, LoadTimes, RequestRefused
from rayrl.inference.registry import make_engine
from rayrl.inference.settings import EngineSettings
from rayrl.inference.staging import Staging
from rayrl.infra.publication import TRANSFER_GROUP
from rayrl.types.sampling import Chunk, Completion, GenerationRequest, RequestFailure, join_chunks
from rayrl.utils.logger import get_logger, setup_logging

if TYPE_CHECKING:
    from rayrl.inference.adapter_merge import AdapterMerge
    from rayrl.infra.collective_group import Backend
    from rayrl.infra.collective_recorder import CollectiveRecorder
    from rayrl.infra.publication import EngineAck
    from rayrl.infra.rendezvous import RendezvousAddress
    from rayrl.infra.weight_manifest import WeightManifest
    from rayrl.infra.weight_route import Parcel, ReceivedWeights, WeightRoute

_BUSY_S = 0.05
_MAX_TRANSFERS = 8
"""At once: one, and those that were given up and have not ended yet."""


class EngineActor:
    """One inference engine with its part in the publication of weights."""

    def __init__(self, index: int, settings: EngineSettings) -> None:
        setup_logging()
        self.name = f"inference-{index}"
        self._logger = get_logger("inference", index)
        # Engines with the same seed would give the same samples to requests without one.
        self._engine = make_engine(settings, name=self.name, seed=settings.seed * 1_000_003 + index)
        self._staging = Staging(self.name)
        self._settings = settings
        self._merge = self._make_merge()
        self._route: WeightRoute | None = None
        self._epoch = -1
        self._recorder: CollectiveRecorder | None = None
        if settings.recording is not None:
            from rayrl.infra.collective_recorder import open_recorder

            self._recorder = open_recorder(settings.recording.folder, self.name)
        self._closed = asyncio.Event()
        # A pool of their own: transfers that hang must not keep the engine from loading.
        self._transfers = ThreadPoolExecutor(_MAX_TRANSFERS, thread_name_prefix="receive")
        self._receiving: set[object] = set()

    async def ready(self) -> dict[str, Any]:
        """Start the engine; return where it runs."""
        from rayrl.infra.process_info import process_info

        await self._engine.start()
        if self._merge is not None:
            await asyncio.to_thread(self._merge.open)
        return process_info()

    async def until_closed(self) -> None:
        """Return after `close`; the call ends with the process, too, which is how the driver notices that."""
        await self._closed.wait()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[Chunk | RequestFailure]]:
        """Yield what all requests have had since the last list, until each has ended.

        A request that cannot be served becomes a `RequestFailure`. Raises EngineError if the engine fails.
        """
        items: asyncio.Queue[Chunk | RequestFailure | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(request, items)) for request in requests]
        num_open = len(tasks)
        try:
            while num_open:
                ready = [await items.get()]
                while not items.empty():
                    ready.append(items.get_nowait())
                failure = next((item for item in ready if isinstance(item, Exception)), None)
                batch = [item for item in ready if not isinstance(item, Exception)]
                num_open -= sum(isinstance(item, RequestFailure) or item.finish_reason is not None for item in batch)
                if batch:
                    yield batch
                if failure is not None:
                    raise failure
        finally:
            # A cancelled task closes its iterator, which aborts the request.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""
        for request_id in request_ids:
            await self._engine.abort(request_id)

    async def join_transfer(
        self,
        address: "RendezvousAddress",
        epoch: int,
        rank: int,
        members: Sequence[str],
        backend: "Backend",
        timeout_s: float,
    ) -> None:
        """Leave the transfer group of the last epoch and join that of this one.

        TransferError if a later epoch was asked for meanwhile: its group stays.
        """
        from rayrl.infra.collective_group import CollectiveGroup
        from rayrl.infra.weight_route import CollectiveRoute

        self._close_route()
        self._epoch = epoch
        group = await asyncio.to_thread(
            CollectiveGroup.join,
            address,
            name=TRANSFER_GROUP,
            epoch=epoch,
            rank=rank,
            members=members,
            backend=backend,
            timeout_s=timeout_s,
            recorder=self._recorder,
        )
        if epoch != self._epoch:
            group.close()
            raise TransferError(f"{group.label}: {self.name} was told to join epoch {self._epoch} meanwhile")
        self._route = CollectiveRoute(group)

    async def prepare(self, manifest: "WeightManifest") -> None:
        """Check a manifest against the model. EngineError with the first difference."""
        specs = [(spec.name, spec.shape, spec.dtype) for spec in manifest.tensors]
        if self._merge is not None:
            self._merge.check(specs)
            specs = [(spec.name, spec.shape, spec.dtype) for spec in self._merge.specs]
        await self._engine.check_weights(specs)
        self._staging.prepare(manifest)

    async def receive(
        self, manifest: "WeightManifest", parcels: "Sequence[Parcel]" = (), timeout_s: float = 300.0
    ) -> "EngineAck":
        """Receive the prepared version and stage it; return the digests of what arrived.

        What is known here to differ from what was sent is not staged; the digests say so to the driver.

        Args:
            parcels: what the senders left; none on collective routes.
            timeout_s: limit of fetching; on collective routes that of the group counts.
        """
        from rayrl.infra.publication import EngineAck

        if self._route is None:
            self._route = self._make_stored_route(manifest.version)
        self._staging.begin(manifest)
        try:
            received = await self._receive(self._route, manifest, parcels, timeout_s)
        except BaseException:
            self._staging.failed(manifest)
            raise
        if received.fault is None:
            self._staging.arrived(manifest, received.tensors)
        else:
            self._logger.error("engine %s refuses version %d: %s", self.name, manifest.version, received.fault)
            self._staging.failed(manifest)
        return EngineAck(engine=self.name, version=manifest.version, digests=received.digests, times=received.times)

    async def commit(self, version: int) -> LoadTimes:
        """Use the staged version from the next step on. EngineError if it is not staged."""
        times = await self._engine.load(version, self._staging.staged(version))
        self._staging.committed()
        if self._merge is not None:
            self._merge.committed()
        self._logger.debug("engine %s uses version %d", self.name, version)
        return times

    async def discard(self, version: int) -> None:
        """Forget a version that was not committed; the one in use stays."""
        self._staging.discard(version)

    async def sleep(self) -> None:
        """Give device memory back. EngineError where the engine cannot."""
        await self._engine.sleep()

    async def wake(self) -> None:
        """Take the memory again."""
        await self._engine.wake()

    async def weight_checksums(self, manifest: "WeightManifest") -> Mapping[str, str]:
        """Return the checksums of those weights in use that the engine can say."""
        if self._merge is not None:
            untouched = await self._engine.checksums(self._merge.untouched())
            return {**untouched, **await asyncio.to_thread(self._merge.checksums, manifest)}
        return await self._engine.checksums([(spec.name, spec.shape, spec.dtype) for spec in manifest.tensors])

    async def sample_probe(self, request: GenerationRequest, timeout_s: float = 300.0) -> Completion:
        """Return one sequence as a whole. DeadlineExceeded if the engine has had no room for it for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return join_chunks([chunk async for chunk in self._engine.generate(request)])
            except EngineBusy as error:
                # A full queue says nothing about the weights.
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"no room for {request.request_id} in {timeout_s:g} s: {error}") from error
            await asyncio.sleep(_BUSY_S)

    async def status(self) -> EngineStatus:
        """Return a snapshot of the engine."""
        return await self._engine.status()

    async def close(self) -> None:
        """End all requests and free everything."""
        self._closed.set()
        try:
            self._close_route()
        finally:
            self._transfers.shutdown(wait=False, cancel_futures=True)
            await self._engine.close()

    async def _receive(
        self, route: "WeightRoute", manifest: "WeightManifest", parcels: "Sequence[Parcel]", timeout_s: float
    ) -> "ReceivedWeights":
        """Return the version, in the engine's own memory wherever that is possible."""
        from rayrl.infra.buckets import stream_offsets
        from rayrl.infra.weight_route import staged_in

        merge = self._merge
        num_bytes = stream_offsets(manifest.tensors)[1] if merge is None else merge.num_bytes
        # A transfer that was given up may still write, or be about to: then its memory is not for another one.
        is_alone, this = not self._receiving, object()
        self._receiving.add(this)

        def receive() -> "ReceivedWeights":
            if merge is None:
                return staged_in(route.receive(manifest, parcels, timeout_s, memory), manifest, memory)
            received = route.receive(manifest, parcels, timeout_s)
            if received.fault is not None:
                return received
            start = time.perf_counter()
            tensors = merge.merge(received.tensors, memory)
            merge_s = time.perf_counter() - start
            return replace(received, tensors=tensors, times={**received.times, "merge": merge_s})

        try:
            memory = await self._engine.staging_memory(num_bytes) if is_alone else None
            arriving = self._transfers.submit(receive)
        except BaseException:
            self._receiving.discard(this)
            raise
        # The thread goes on when its caller has left.
        arriving.add_done_callback(lambda _: self._receiving.discard(this))
        return await asyncio.wrap_future(arriving)

    def _make_merge(self) -> "AdapterMerge | None":
        lora = self._settings.lora
        if lora is None:
            return None
        from rayrl.inference.adapter_merge import AdapterMerge

        return AdapterMerge(self.name, self._settings.model, lora)

    def _make_stored_route(self, version: int) -> "WeightRoute":
        from rayrl.infra.route_table import make_stored_route

        try:
            return make_stored_route(self._settings.transfer, Path(self._settings.model.path))
        except TransferError as error:
            raise TransferError(f"engine {self.name} cannot receive version {version}: {error}") from None

    def _close_route(self) -> None:
        route, self._route = self._route, None
        if route is not None:
            route.close()

    async def _feed(
        self, request: GenerationRequest, items: "asyncio.Queue[Chunk | RequestFailure | Exception]"
    ) -> None:
        ended = False
        try:
            async for chunk in self._engine.generate(request):
                ended = chunk.finish_reason is not None
                items.put_nowait(chunk)
            if not ended:
                # The reader of the call would wait for the end of this one for ever.
                raise EngineError(f"engine {self.name} gave no reason for the end of request {request.request_id!r}")
        except (EngineBusy, RequestRefused) as error:
            retry = isinstance(error, EngineBusy)
            items.put_nowait(RequestFailure(request_id=request.request_id, message=str(error), retry=retry))
        except Exception as error:  # noqa: BLE001 - handed to the reader of the call, which raises it
            items.put_nowait(error)
