"""The training engine on ZeRO of DeepSpeed; the only file that imports it.

The step is that of the other engine: the same plan of micro-batches, the same denominators, torch's AdamW with the
same schedule. DeepSpeed divides optimizer state (1), gradients (2) and parameters (3) over the ranks, averages and
clips the gradients, and skips a step whose gradient is not finite. A loss that is not finite is turned into such a
gradient before the last backward, on the device.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayrl.config.training import DeepSpeedEngine as DeepSpeedConfig
from rayrl.errors import EngineError
from rayrl.infra.buckets import TensorSpec
from rayrl.models.export import export_hf_folder
from rayrl.models.loading import load_causal_lm
from rayrl.training import attention
from rayrl.training.batch import FloatArray, TrainBatch
from rayrl.training.collate import MicroBatch, collate
from rayrl.training.deepspeed_config import deepspeed_options, frozen_options
from rayrl.training.engine import EngineStatus, StepResult, TrainEngineSettings
from rayrl.training.forward import StepTotals, attention_cost, loss_view, not_finite, skipped_step
from rayrl.training.fragments import Fragment, load_fragments
from rayrl.training.logprobs import HeadSettings
from rayrl.training.lora import (
    PublishedWeight,
    adapter_specs,
    adapter_tensors,
    adapters_off,
    attach_lora,
    published_weights,
    trained,
)
from rayrl.training.losses import LossFunction
from rayrl.training.micro_batches import plan_micro_batches
from rayrl.training.optimizer import make_optimizer, set_lr
from rayrl.training.policy_model import PolicyModel, can_pack, can_share_prompts
from rayrl.training.rows import plan_rows, row_lengths
from rayrl.training.scalar_head import classifier_config, make_model
from rayrl.training.schedule import lr_factor
from rayrl.training.sharding import weights_of
from rayrl.training.state import StateSaver, random_state, restore_random_state
from rayrl.utils.logger import get_logger

_GATHER_BYTES = 256 * 1024 * 1024
"""Weights that ZeRO 3 gathers at once for publication and export."""


class DeepSpeedEngine:
    """Implements `TrainEngine`. With more than one rank the default process group must exist."""

    def __init__(self, settings: TrainEngineSettings) -> None:
        engine = settings.training.engine
        assert isinstance(engine, DeepSpeedConfig), "the registry makes the engine that the config chooses"
        self._settings = settings
        self._options = engine
        self._log = get_logger("train", settings.rank)
        self._library = _import_deepspeed(settings)
        self._product_dtype = torch.bfloat16 if engine.autocast == "bfloat16" else torch.float32
        policy = self._load()
        if settings.training.lora is not None:
            attach_lora(policy.lm, settings.training.lora)
        self._share_prompts = engine.share_prompts and can_share_prompts(policy.lm)
        self._packed = engine.packing and can_pack(policy)
        self._attention_cost = attention_cost(policy)
        self._weights = weights_of(policy)
        self._trained = trained(self._weights)
        # Parameters that are divided do not know their shapes.
        self._shapes = {name: tuple(weight.shape) for name, weight in self._weights.items()}
        self._published = published_weights(policy.lm)
        self._lm_config_changes = classifier_config(policy.lm) if settings.head == "scalar" else {}
        optimizer = make_optimizer(self._weights.items(), settings.training.optimizer)
        self._engine: Any = self._initialize(policy, deepspeed_options(settings.training, engine), optimizer)
        # With adapters the reference is the policy without them.
        with_reference = settings.with_reference and settings.training.lora is None
        self._reference: Any = self._make_reference() if with_reference else None
        self._optimizer_steps = 0
        self._saver = StateSaver()

    def train_step(self, batch: TrainBatch, loss_fn: LossFunction) -> StepResult:
        """See `TrainEngine`."""
        training = self._settings.training
        lr = training.optimizer.lr * lr_factor(self._optimizer_steps, training.schedule, self._settings.num_steps)
        if batch.loss_counts.sum() == 0:
            return skipped_step("no token of the step carries loss", lr=lr)
        totals, sums, maxima = self._backward(batch, loss_fn)
        set_lr(self._engine.optimizer, lr)
        self._engine.step()
        reading = totals.read(sums, maxima, sums.new_tensor(float(self._engine.get_global_grad_norm())))
        reason = not_finite(reading.loss, reading.norm, reading.metrics)
        assert (reason is None) == (not self._engine.optimizer.overflow), "DeepSpeed skips exactly what is not finite"
        if reason is None:
            self._optimizer_steps += 1
        else:
            self._log.warning("optimizer step after %d is skipped: %s", self._optimizer_steps, reason)
        return StepResult(
            skipped=reason is not None,
            reason=reason,
            loss=reading.loss,
            grad_norm=reading.norm,
            lr=lr,
            sums=reading.metrics,
            num_processed_tokens=reading.num_processed,
        )

    def forward_logprobs(self, batch: TrainBatch, *, reference: bool = False) -> FloatArray:
        """See `TrainEngine`."""
        assert self._settings.head == "policy", "a scalar head has no logprobs"
        if reference and self._settings.training.lora is not None:
            with adapters_off(self._engine.module):
                return self._forward_tokens(self._engine, batch)
        model = self._reference if reference else self._engine
        assert model is not None, "the engine was made without a reference policy"
        return self._forward_tokens(model, batch)

    def refresh_reference(self) -> None:
        """Not with this engine, which the config says beforehand: EngineError."""
        raise EngineError("the reference policy of the deepspeed engine stays where training started")

    def forward_values(self, batch: TrainBatch) -> FloatArray:
        """See `TrainEngine`."""
        assert self._settings.head == "scalar", "the engine was made without a scalar head"
        return self._forward_tokens(self._engine, batch)

    def gradients(self, batch: TrainBatch, loss_fn: LossFunction) -> dict[str, Tensor]:
        """See `TrainEngine`."""
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        self._backward(batch, loss_fn)
        shapes = self._shapes
        whole = {name: safe_get_full_grad(weight).view(shapes[name]).clone() for name, weight in self._trained.items()}
        # A step on a gradient that is not finite clears all buffers and changes nothing else.
        for name, weight in self._trained.items():
            safe_set_full_grad(weight, torch.full_like(whole[name], float("nan")))
        if self._options.offload_optimizer:
            # On the host the norm is made of norms that are taken when gradients arrive.
            norms = self._engine.optimizer.norm_for_param_grads
            norms.update(dict.fromkeys(norms, torch.tensor(float("nan"))))
        self._engine.step()
        return whole

    def weight_specs(self, dtype: str) -> tuple[TensorSpec, ...]:
        """See `TrainEngine`."""
        return tuple(TensorSpec(name=weight.name, shape=weight.shape, dtype=dtype) for weight in self._published)

    def weight_tensors(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine`. ZeRO 3 gathers a bucket of parameters at a time."""
        target = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        for bucket in self._buckets():
            with self._gathered([parameter for weight in bucket for parameter in weight.parameters]):
                for weight in bucket:
                    yield weight.name, weight.merged(lambda part: part, target)

    def adapter_specs(self) -> tuple[TensorSpec, ...]:
        """See `TrainEngine`."""
        return adapter_specs(self._published)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine`."""
        for weight in self._published:
            if weight.adapter is not None:
                with self._gathered(list(weight.adapter)):
                    yield from adapter_tensors([weight], lambda part: part)

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """See `TrainEngine`. Each rank writes what it holds."""
        pieces = {fragment.key: fragment.values for fragment in self._fragments()}
        steps = {"optimizer_steps": torch.tensor(self._optimizer_steps)}
        return self._saver.begin_tensors(folder, pieces | random_state() | steps)

    def save(self, folder: Path) -> None:
        """See `TrainEngine`."""
        self.begin_save(folder)()

    def load(self, folder: Path) -> None:
        """See `TrainEngine`. Any number of ranks and any stage can read it."""
        fragments, random, steps = list(self._fragments()), random_state(), torch.tensor(0)
        sizes = {
            name: num_elements(self._shapes[name]) for name, weight in self._weights.items() if weight.requires_grad
        }
        load_fragments(folder, fragments, sizes, random | {"optimizer_steps": steps})
        self._optimizer_steps = int(steps)
        for state in self._engine.optimizer.optimizer.state.values():
            state["step"].fill_(float(self._optimizer_steps))
        self._spread_loaded(fragments)
        restore_random_state(random)

    def export_hf(self, folder: Path) -> None:
        """See `TrainEngine`. Rank 0 writes; an existing folder is replaced."""
        gathered: dict[str, Tensor] = {}
        for name, tensor in self.weight_tensors("float32"):
            if self._settings.rank == 0:
                gathered[name] = tensor.cpu().clone()
        if self._settings.rank == 0:
            source = Path(self._settings.model.path)
            export_hf_folder(gathered, source, folder, replace=True, config_changes=self._lm_config_changes)

    def status(self) -> EngineStatus:
        """See `TrainEngine`."""
        return EngineStatus(
            optimizer_steps=self._optimizer_steps,
            num_parameters=sum(num_elements(shape) for shape in self._shapes.values()),
            world_size=self._settings.world_size,
            device=str(self._settings.device),
        )

    def _load(self) -> PolicyModel:
        settings, engine = self._settings, self._options
        lm = load_causal_lm(
            settings.model.path,
            dtype=torch.float32,
            attention=attention.register() if engine.attention == "sdpa" else engine.attention,
            trust_remote_code=settings.model.trust_remote_code,
        )
        head = HeadSettings(
            temperature=settings.temperature,
            chunk_tokens=engine.logprob_chunk_tokens,
            product_dtype=self._product_dtype,
        )
        return make_model(
            lm,
            head,
            settings.head,
            folder=settings.model.path,
            device=settings.device,
            activation_checkpointing=engine.activation_checkpointing,
        )

    def _initialize(self, policy: PolicyModel, options: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> Any:
        if self._options.zero_stage == 3:
            # The head is used outside of its own module; so ZeRO 3 must gather it for the whole forward.
            for weight in _head_weights(policy):
                self._library.zero.register_external_parameter(policy, weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, *_ = self._library.initialize(model=policy, optimizer=optimizer, config=options)
        engine.eval()
        return engine

    def _make_reference(self) -> Any:
        frozen = self._load().requires_grad_(False)
        return (
            self._initialize(frozen, frozen_options(self._options), None) if self._options.zero_stage == 3 else frozen
        )

    def _backward(self, batch: TrainBatch, loss_fn: LossFunction) -> tuple[StepTotals, Tensor, Tensor]:
        """Accumulate the gradient; return the totals, and their sums and maxima over the ranks."""
        denominator = loss_fn.denominator(batch.loss_counts)
        plan = self._plan(batch)
        totals = StepTotals(self._settings.device)
        sums, maxima = totals.vectors()
        for number, micro in enumerate(plan, start=1):
            is_last = number == len(plan)
            self._engine.set_gradient_accumulation_boundary(is_last)
            output, entropy = self._engine(micro, loss_fn.needs_entropy)
            share, parts = loss_fn(loss_view(micro, batch, output, entropy, self._settings.head), denominator)
            totals.add(share, parts, micro.input_ids.numel())
            # DeepSpeed averages gradients over the ranks; the denominator is already that of all of them.
            factor = torch.full_like(share.detach(), float(self._settings.world_size))
            if is_last:
                sums, maxima = totals.vectors()
                if self._settings.world_size > 1:
                    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
                    if maxima.numel():
                        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
                factor = torch.where(sums[0].isfinite(), factor, float("nan"))
            self._engine.backward(share * factor)
        return totals, sums, maxima

    def _plan(self, batch: TrainBatch) -> Sequence[MicroBatch]:
        """Return the micro-batches of this rank; the same number on every rank."""
        settings = self._settings
        budget = settings.training.micro_batch_tokens
        rows = plan_rows(batch, share=self._share_prompts, attention_cost=self._attention_cost, max_tokens=budget)
        plan = plan_micro_batches(
            row_lengths(rows), settings.world_size, budget, self._attention_cost, packed=self._packed
        )
        return [
            collate(batch, [rows[index] for index in indices], settings.device, packed=self._packed)
            for indices in plan.ranks[settings.rank]
        ]

    def _forward_tokens(self, model: Any, batch: TrainBatch) -> FloatArray:
        """Return [sum T] what the model gives for each loss-carrying token, 0 elsewhere, without gradient."""
        device = self._settings.device
        output = torch.zeros(len(batch.tokens), device=device)
        # A reference that is no engine of DeepSpeed does not enter this by itself.
        autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._product_dtype == torch.bfloat16)
        with torch.no_grad(), autocast if isinstance(model, PolicyModel) else nullcontext():
            for micro in self._plan(batch):
                values, _ = model(micro, False)
                output[micro.flat] = values[: micro.flat.numel()]
            if self._settings.world_size > 1:
                dist.all_reduce(output, op=dist.ReduceOp.SUM)
        result: FloatArray = output.cpu().numpy()
        return result

    def _buckets(self) -> Iterator[list[PublishedWeight]]:
        """Yield weights in order, at most `_GATHER_BYTES` at a time unless one alone is more."""
        bucket: list[PublishedWeight] = []
        num_bytes = 0
        for weight in self._published:
            size = 4 * num_elements(weight.shape)
            if bucket and num_bytes + size > _GATHER_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(weight)
            num_bytes += size
        yield bucket

    def _gathered(self, weights: list[nn.Parameter]) -> Any:
        if self._options.zero_stage < 3:
            return nullcontext()
        return self._library.zero.GatheredParameters(weights, modifier_rank=None)

    def _fragments(self) -> Iterator[Fragment]:
        """Yield the pieces of weights and moments that this rank holds, as the memory in use."""
        self._make_moments()
        pieces = self._pieces_of_parameters if self._options.zero_stage == 3 else self._pieces_of_groups
        for name, weight in self._trained.items():
            yield from pieces(name, weight)

    def _pieces_of_groups(self, name: str, weight: Any) -> Iterator[Fragment]:
        """Yield the pieces of one parameter in ZeRO 1 and 2, which cut flattened groups of whole parameters."""
        mapping = weight._hp_mapping
        if mapping is None:  # all of it is on other ranks
            return
        optimizer = self._engine.optimizer
        flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        inside = mapping.get_hp_fragment_address()
        moments = optimizer.optimizer.state[flat]
        for kind, tensor in (("weight", flat), ("exp_avg", moments["exp_avg"]), ("exp_avg_sq", moments["exp_avg_sq"])):
            values = tensor.detach().narrow(0, inside.start, inside.numel)
            yield Fragment(kind=kind, name=name, start=mapping.lp_fragment_address.start, values=values)

    def _pieces_of_parameters(self, name: str, weight: Any) -> Iterator[Fragment]:
        """Yield the pieces of one parameter in ZeRO 3, which cuts each into equal parts; the last ones are padded."""
        optimizer = self._engine.optimizer
        group, offset, length = optimizer.grad_position[optimizer.get_param_id(weight)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        start = self._settings.rank * length
        held = max(0, min(length, num_elements(self._shapes[name]) - start))
        if held == 0:
            return
        moments = optimizer.optimizer.state[flat]
        for kind, tensor in (("weight", flat), ("exp_avg", moments["exp_avg"]), ("exp_avg_sq", moments["exp_avg_sq"])):
            yield Fragment(kind=kind, name=name, start=start, values=tensor.detach().narrow(0, offset, held))

    def _make_moments(self) -> None:
        """Give a fresh optimizer its moments, which it would make in its first step."""
        optimizer = self._engine.optimizer
        stage_3 = self._options.zero_stage == 3
        flats = optimizer.fp32_partitioned_groups_flat if stage_3 else optimizer.single_partition_of_fp32_groups
        for flat in flats:
            if not optimizer.optimizer.state[flat]:
                optimizer.optimizer.state[flat] = {
                    "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                    "exp_avg": torch.zeros_like(flat),
                    "exp_avg_sq": torch.zeros_like(flat),
                }

    def _spread_loaded(self, fragments: list[Fragment]) -> None:
        """Make the weights that the model computes with those that were loaded into the optimizer."""
        optimizer = self._engine.optimizer
        if self._options.zero_stage < 3:
            optimizer.update_lp_params()
            return
        optimizer._partition_all_parameters()
        for fragment in fragments:
            if fragment.kind == "weight":
                weight: Any = self._weights[fragment.name]
                weight.ds_tensor.data.view(-1)[: fragment.values.numel()].copy_(fragment.values)
        # Small parameters stay gathered between steps.
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def num_elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of this shape; parameters of ZeRO 3 do not know it."""
    return int(torch.Size(shape).numel())


def _head_weights(policy: PolicyModel) -> list[nn.Parameter]:
    output: Any = policy.lm.get_output_embeddings()
    head = output if isinstance(output, nn.Linear) else policy.lm.score
    weights: list[Any] = [head.weight, head.bias]
    return [weight for weight in weights if weight is not None]


def _import_deepspeed(settings: TrainEngineSettings) -> Any:
    """Return the library, told of the device. EngineError if it is not installed or there is no process group.

    One rank gets a process group of its own: DeepSpeed does nothing without one.
    """
    device_type = settings.device.type
    # Read at import. A rank sees only its own device.
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        import deepspeed
    except ImportError as error:
        raise EngineError(
            f"training.engine.type=deepspeed needs DeepSpeed: pip install 'rayrl[deepspeed]' ({error})"
        ) from error
    if device_type == "cpu":
        # As of 0.19.8 it would compile an operation of its own for what gloo does, at the first start and for minutes.
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.utils.logger.setLevel("WARNING")
    if settings.world_size == 1 and not dist.is_initialized():
        backend = "nccl" if device_type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if not dist.is_initialized() or dist.get_world_size() != settings.world_size:
        raise EngineError(f"{settings.world_size} training ranks (training.parallel) need a process group of that size")
    return deepspeed
