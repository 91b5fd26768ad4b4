"""The training worker: a thin shell over a training engine; made an actor where it is spawned.

Every method but the rendezvous is called on all workers at once, because engines are collective. One method runs at a
time. What a rank waits for inside is another rank in the same method; the process group's timeout ends that.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrl.errors import EngineError, TransferError
from rayrl.infra.publication import TRANSFER_GROUP
from rayrl.training.background_save import BackgroundSave
from rayrl.training.settings import TrainWorkerSettings
from rayrl.training.step import TrainStepRequest, TrainStepResult
from rayrl.utils.logger import get_logger, setup_logging

if TYPE_CHECKING:
    import pyarrow as pa

    from rayrl.config.transfer import TransferConfig
    from rayrl.infra.collective_group import Backend, HostedRendezvous, RendezvousAddress
    from rayrl.infra.collective_recorder import CollectiveRecorder
    from rayrl.infra.weight_manifest import WeightManifest
    from rayrl.infra.weight_route import SentWeights, WeightRoute
    from rayrl.training.batch import TrainBatch
    from rayrl.training.critic import Critic
    from rayrl.training.engine import EngineStatus, StepResult, TrainEngine
    from rayrl.training.pairs import PairLoss

_RENDEZVOUS_TIMEOUT_S = 120.0


class TrainWorker:
    """One rank of the training group."""

    def __init__(self, rank: int, world_size: int, settings: TrainWorkerSettings) -> None:
        import torch

        setup_logging()
        torch.set_num_threads(settings.training.threads_per_worker)
        self._rank = rank
        self._world_size = world_size
        self._settings = settings
        self._log = get_logger("train", rank)
        self._engine: TrainEngine | None = None
        self._critic: Critic | None = None
        self._saving = BackgroundSave()
        self._training_rendezvous: HostedRendezvous | None = None
        self._transfer_rendezvous: HostedRendezvous | None = None
        self._route: WeightRoute | None = None
        self._recorder: CollectiveRecorder | None = None

    def ready(self) -> dict[str, Any]:
        """Return node, host and process id."""
        from rayrl.infra.process_info import process_info

        return process_info()

    def host_training_rendezvous(self) -> "RendezvousAddress":
        """Open the store in which the training group meets, on rank 0, and return its address."""
        self._training_rendezvous = self._host()
        return self._training_rendezvous.address

    def setup(self, address: "RendezvousAddress") -> None:
        """Join the training group and load the model. ModelError if it cannot be loaded."""
        import torch

        from rayrl.training.critic import make_critic
        from rayrl.training.engine import TrainEngineSettings
        from rayrl.training.registry import make_train_engine

        settings = self._settings
        device = torch.device("cuda", 0) if settings.training.gpus_per_worker > 0 else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._recorder = self._make_recorder(address)
        if self._world_size > 1:
            self._join_training_group(address, device.type)
        torch.manual_seed(settings.seed + self._rank)
        torch.use_deterministic_algorithms(settings.deterministic)
        start = time.monotonic()
        self._engine = make_train_engine(
            TrainEngineSettings(
                model=settings.model,
                training=settings.training,
                rank=self._rank,
                world_size=self._world_size,
                temperature=settings.temperature,
                num_steps=settings.num_policy_steps,
                device=device,
                with_reference=settings.with_reference,
                head=settings.head,
            )
        )
        self._critic = make_critic(settings, rank=self._rank, world_size=self._world_size, device=device)
        self._log.info("model %s is loaded (%.1f s)", settings.model.path, time.monotonic() - start)

    def train_step(self, request: TrainStepRequest, *batches: "pa.RecordBatch") -> TrainStepResult:
        """Train on the groups in `batches`, each rank on its share of them; all ranks are given the same batches."""
        from rayrl.checkpoint.group_digest import group_digest
        from rayrl.training.batch import split_groups
        from rayrl.training.losses import PolicyLoss
        from rayrl.training.policy_batch import prepare_batch
        from rayrl.training.token_selection import choose_tokens

        settings, engine = self._settings, self._ready_engine
        algorithm = settings.algorithm
        if algorithm is None:
            raise EngineError("this training worker was made for supervised steps: its settings have no algorithm")
        start = time.monotonic()
        digest = group_digest(batches) if self._rank == 0 else ""
        batch, metrics = prepare_batch(engine, batches, request, algorithm, settings, self._critic)
        loss_fn = PolicyLoss(algorithm, settings.max_new_tokens, version=request.version, kl_coef=request.kl_coef)
        # Failures may have left fewer groups than parts, or none.
        parts = split_groups(batch, settings.minibatches) or [batch]
        if self._critic is not None:
            metrics |= self._critic.train(batch, parts)
        is_warmup = algorithm.critic is not None and request.step <= algorithm.critic.warmup_steps
        steps = [
            engine.train_step(choose_tokens(engine, part, loss_fn, settings.seed), loss_fn)
            for part in ([] if is_warmup else parts)
        ]
        if algorithm.kl.refresh_every > 0 and request.step % algorithm.kl.refresh_every == 0:
            engine.refresh_reference()
        return replace(_result(batch, steps, metrics, time.monotonic() - start), data_digest=digest)

    def sft_step(self, step: int, *batches: "pa.RecordBatch") -> TrainStepResult:
        """Make one supervised optimizer step, number `step` of the run, on the loss-carrying tokens of `batches`."""
        from rayrl.training.batch import batch_from_arrow
        from rayrl.training.losses import SupervisedLoss

        start = time.monotonic()
        batch, _ = batch_from_arrow(batches)
        result = self._ready_engine.train_step(batch, SupervisedLoss())
        return _result(batch, [result], {}, time.monotonic() - start)

    def pair_step(self, step: int, *batches: "pa.RecordBatch") -> TrainStepResult:
        """Make one optimizer step, number `step` of the run, on pairs: two rows each, the better answer first."""
        from rayrl.training.batch import batch_from_arrow
        from rayrl.training.pairs import pair_step

        start = time.monotonic()
        batch, _ = batch_from_arrow(batches)
        result, metrics = pair_step(self._ready_engine, batch, self._pair_loss)
        return _result(batch, [result], metrics, time.monotonic() - start)

    def evaluate_pairs(self, *batches: "pa.RecordBatch") -> dict[str, float]:
        """Return the metrics of `pair_step` on held-out pairs as sums, without changing anything."""
        from rayrl.training.batch import batch_from_arrow
        from rayrl.training.pairs import pair_pass

        batch, _ = batch_from_arrow(batches)
        return pair_pass(self._ready_engine, batch, self._pair_loss).sums

    def host_transfer_rendezvous(self) -> "RendezvousAddress":
        """Open the store in which the transfer group meets, once, on rank 0, and return its address."""
        if self._transfer_rendezvous is None:
            self._transfer_rendezvous = self._host()
        return self._transfer_rendezvous.address

    def join_transfer(
        self, address: "RendezvousAddress", epoch: int, members: Sequence[str], backend: "Backend", timeout_s: float
    ) -> None:
        """Leave the transfer group of the last epoch and join that of this one as rank 0. Called on rank 0 only."""
        from rayrl.infra.collective_group import CollectiveGroup
        from rayrl.infra.weight_route import CollectiveRoute

        if self._route is not None:
            self._route.close()
        group = CollectiveGroup.join(
            address,
            name=TRANSFER_GROUP,
            epoch=epoch,
            rank=0,
            members=members,
            backend=backend,
            timeout_s=timeout_s,
            hosted=self._transfer_rendezvous,
            recorder=self._recorder,
        )
        self._route = CollectiveRoute(group)

    def weight_manifest(self, version: int) -> "WeightManifest":
        """Return what `send_weights` will send."""
        from rayrl.infra.weight_manifest import WeightManifest

        return WeightManifest(
            version=version,
            tensors=self._ready_engine.adapter_specs()
            if self._sends_adapters
            else self._ready_engine.weight_specs(self._settings.model.dtype),
            bucket_bytes=self._transfer.bucket_bytes,
        )

    @property
    def _sends_adapters(self) -> bool:
        return self._transfer.lora == "adapters"

    def send_weights(self, version: int) -> "SentWeights | None":
        """Send all weights on their route; return what was sent, on ranks that send nothing None.

        All ranks gather tensors in the same order, on the thread that sends: gathers and broadcasts cannot cross.
        """
        manifest = self.weight_manifest(version)
        tensors = (
            self._ready_engine.adapter_tensors()
            if self._sends_adapters
            else self._ready_engine.weight_tensors(self._settings.model.dtype)
        )
        # Over CUDA IPC each rank has an engine on its own GPU.
        if self._rank > 0 and self._transfer.backend != "cuda_ipc":
            for _ in tensors:
                pass
            return None
        if self._route is None:
            self._route = self._make_stored_route(version)
        try:
            return self._route.send(manifest, tensors)
        except BaseException:
            # The other ranks gather to the end whatever happens here, and would hang in a gather that is left out.
            for _ in tensors:
                pass
            raise

    def release_weights(self, version: int) -> None:
        """Free what was kept for engines that had yet to fetch this version."""
        if self._route is not None:
            self._route.release(version)

    def begin_save(self, folder: str) -> None:
        """Copy the training state and start writing it; training may go on. CheckpointError if one is under way."""
        # Asked first: the copy of a save that is refused would be made for nothing.
        self._saving.check_free()
        writes = [self._ready_engine.begin_save(Path(folder))]
        if self._critic is not None:
            writes.append(self._critic.begin_save(Path(folder)))

        def write_all() -> None:
            for write in writes:
                write()

        self._saving.start(write_all)

    def save_ended(self) -> bool:
        """Return whether the last save is written. CheckpointError, once, with what it failed with."""
        return self._saving.poll()

    def weight_checksums(self) -> dict[str, str]:
        """Return the checksum of each weight and adapter as it is sent; rank 0 has them, the others gather with it."""
        from itertools import chain

        from rayrl.training.probe import checksums

        weights = self._ready_engine.weight_tensors(self._settings.model.dtype)
        tensors = chain(weights, self._ready_engine.adapter_tensors())
        if self._rank > 0:
            for _ in tensors:
                pass
            return {}
        return checksums(tensors)

    def score_probe(self, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the logprobs of completions of `prompt` under the weights now."""
        from rayrl.training.probe import score

        return score(self._ready_engine, prompt, completions)

    def save(self, folder: str) -> None:
        """Write the training state."""
        self._ready_engine.save(Path(folder))
        if self._critic is not None:
            self._critic.save(Path(folder))

    def load(self, folder: str) -> None:
        """Restore the training state. CheckpointError if it is incomplete or foreign."""
        self._ready_engine.load(Path(folder))
        if self._critic is not None:
            self._critic.load(Path(folder))

    def export_hf(self, folder: str) -> None:
        """Write the weights as a model folder of Hugging Face; an existing one is replaced."""
        self._ready_engine.export_hf(Path(folder))

    def status(self) -> "EngineStatus":
        """Return counts of the engine."""
        return self._ready_engine.status()

    def close(self) -> None:
        """Leave all groups."""
        import torch.distributed as dist

        if self._route is not None:
            self._route.close()
            self._route = None
        if self._world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
        for rendezvous in (self._transfer_rendezvous, self._training_rendezvous):
            if rendezvous is not None:
                rendezvous.close()

    @property
    def _transfer(self) -> "TransferConfig":
        transfer = self._settings.transfer
        if transfer is None:
            raise TransferError("this training worker was made without transfer settings: it publishes no weights")
        return transfer

    def _make_stored_route(self, version: int) -> "WeightRoute":
        from rayrl.infra.route_table import make_stored_route

        try:
            return make_stored_route(self._transfer, Path(self._settings.model.path))
        except TransferError as error:
            raise TransferError(f"training rank {self._rank} cannot send version {version}: {error}") from None

    @property
    def _pair_loss(self) -> "PairLoss":
        if self._settings.pairs is None:
            raise EngineError("this training worker was not made for pairs: its settings have no loss on them")
        return self._settings.pairs

    @property
    def _ready_engine(self) -> "TrainEngine":
        if self._engine is None:
            raise EngineError(f"training rank {self._rank} is not set up; call setup first")
        return self._engine

    def _host(self) -> "HostedRendezvous":
        from rayrl.infra.collective_group import host_rendezvous

        host = self.ready()
        # Without Ray all ranks are on this machine, whose name need not resolve.
        return host_rendezvous(host["host"] if host["node"] else "127.0.0.1", _RENDEZVOUS_TIMEOUT_S)

    def _make_recorder(self, address: "RendezvousAddress") -> "CollectiveRecorder | None":
        recording = self._settings.recording
        if recording is None:
            return None
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not in `__all__`

        from rayrl.infra.collective_recorder import SideChannel, open_recorder
        from rayrl.infra.rendezvous import reach_rendezvous

        channel = None
        if recording.checks and self._world_size > 1:
            # A connection of its own: a wait of the group on the other one must not keep comparisons waiting.
            store = reach_rendezvous(address, _RENDEZVOUS_TIMEOUT_S)
            channel = SideChannel(store=PrefixStore("collectives", store), timeout_s=recording.timeout_s)
        return open_recorder(recording.folder, f"train-{self._rank}", channel)

    def _join_training_group(self, address: "RendezvousAddress", device_type: str) -> None:
        import torch.distributed as dist

        from rayrl.infra.rendezvous import reach_rendezvous

        hosted = self._training_rendezvous
        store = hosted.store if hosted is not None else reach_rendezvous(address, _RENDEZVOUS_TIMEOUT_S)
        # On GPUs both: with parameters in host memory their gradients are summed there.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if self._recorder is not None:
            from rayrl.infra.recorded_process_group import install

            backend = install(self._recorder, device_type, "train-{}".format)
        dist.init_process_group(
            backend=backend,
            store=store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=self._settings.collective_timeout_s),
        )


def _result(
    batch: "TrainBatch", steps: "Sequence[StepResult]", extra: dict[str, float], seconds: float
) -> TrainStepResult:
    """Join the optimizer steps of one training step; means are over the tokens of those that were not skipped.

    Without any step (the critic warms up) the policy is unchanged on purpose: nothing was skipped.
    """
    from rayrl.training.step_metrics import joined_metrics

    if not steps:
        num_live = int(batch.loss_counts.sum())
        return TrainStepResult(skipped=False, reason=None, metrics=extra, seconds=seconds, num_tokens=num_live)
    done = [step for step in steps if not step.skipped]
    metrics, num_tokens = joined_metrics([step.sums for step in done])
    shown = done or steps
    metrics |= {
        "loss/total": sum(step.loss for step in shown) / len(shown),
        "train/grad_norm": sum(step.grad_norm for step in shown) / len(shown),
        "train/lr": steps[-1].lr,
        "train/loss_tokens": float(num_tokens),
        "train/processed_tokens": float(sum(step.num_processed_tokens for step in steps)),
        "train/batch_tokens": float(len(batch.tokens)),
        "train/optimizer_steps_skipped": float(len(steps) - len(done)),
    }
    skipped = [step.reason for step in steps if step.skipped]
    return TrainStepResult(
        skipped=not done,
        reason=skipped[-1] if skipped else None,
        metrics=metrics | extra,
        seconds=seconds,
        num_tokens=int(num_tokens),
    )
