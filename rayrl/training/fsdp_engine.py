"""The training engine on FSDP2; with one rank the same code without sharding.

One optimizer step: plan the rows of the whole batch (every rank the same plan) ─> for each micro-batch of this rank
forward, loss, backward ─> sum of the metrics over ranks and global gradient norm ─> one transfer to the host ─> step,
or skip it if loss or norm are not finite.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from rayrl.infra.buckets import TensorSpec
from rayrl.models.export import export_hf_folder
from rayrl.training import state
from rayrl.training.batch import FloatArray, TrainBatch
from rayrl.training.build import BuiltPolicy, build_policy
from rayrl.training.collate import MicroBatch, collate, micro_shape
from rayrl.training.engine import EngineStatus, StepResult, TrainEngineSettings
from rayrl.training.expert_halves import by_name
from rayrl.training.expert_parallel import TokenCapacity
from rayrl.training.forward import StepTotals, attention_cost, loss_view, reason_to_skip, skipped_step
from rayrl.training.gradients import clip, total_norm
from rayrl.training.layout import make_layout
from rayrl.training.logprobs import HeadSettings
from rayrl.training.lora import adapter_specs, adapter_tensors, adapters_off, published_weights, trained
from rayrl.training.losses import LossFunction, LossView
from rayrl.training.micro_batches import plan_micro_batches
from rayrl.training.optimizer import make_optimizer, set_lr
from rayrl.training.policy_model import PolicyModel, can_pack, can_share_prompts
from rayrl.training.rows import plan_rows, row_lengths
from rayrl.training.scalar_head import classifier_config
from rayrl.training.schedule import lr_factor
from rayrl.training.sharding import full, weights_of
from rayrl.training.tensor_parallel import sum_gradients
from rayrl.utils.logger import get_logger


class FsdpEngine:
    """Implements `TrainEngine`. With more than one rank the default process group must exist."""

    def __init__(self, settings: TrainEngineSettings) -> None:
        training = settings.training
        self._settings = settings
        self._model_config = settings.model
        self._training = training
        self._rank = settings.rank
        self._world_size = settings.world_size
        self._num_steps = settings.num_steps
        self._device = settings.device
        self._log = get_logger("train", settings.rank)
        self._product_dtype = torch.bfloat16 if training.engine.autocast == "bfloat16" else torch.float32
        self._head = HeadSettings(
            temperature=settings.temperature,
            chunk_tokens=training.engine.logprob_chunk_tokens,
            product_dtype=self._product_dtype,
        )
        self._head_kind = settings.head
        self._layout = make_layout(settings.device, training.parallel, settings.rank, settings.world_size)
        self._capacity = TokenCapacity()
        built = self._build()
        self._policy, self._summed_gradients = built.model, list(built.summed_gradients)
        # With adapters the reference is the policy without them.
        with_reference = settings.with_reference and training.lora is None
        self._reference = self._build().model.requires_grad_(False) if with_reference else None
        self._share_prompts = training.engine.share_prompts and can_share_prompts(self._policy.lm)
        self._packed = training.engine.packing and can_pack(self._policy)
        self._attention_cost = attention_cost(self._policy)
        self._weights = weights_of(self._policy)
        self._trained = trained(self._weights)
        self._published = published_weights(self._policy.lm)
        self._optimizer = make_optimizer(self._weights.items(), training.optimizer)
        self._optimizer_steps = 0
        self._reference_moved = False
        """Whether the reference is another policy than the one of the model folder."""
        self._saver = state.StateSaver()

    def train_step(self, batch: TrainBatch, loss_fn: LossFunction) -> StepResult:
        """See `TrainEngine`."""
        lr = self._training.optimizer.lr * lr_factor(self._optimizer_steps, self._training.schedule, self._num_steps)
        counts = batch.loss_counts
        if counts.sum() == 0:
            return skipped_step("no token of the step carries loss", lr=lr)
        denominator = loss_fn.denominator(counts)
        totals = StepTotals(self._device)
        for micro in self._micro_batches(batch):
            view = self._view(micro, batch, loss_fn.needs_entropy)
            share, parts = loss_fn(view, denominator)
            share.backward()
            totals.add(share, parts, micro.input_ids.numel())
        self._finish_gradients()
        norm = total_norm(self._weights.values(), self._world_size)
        sums, maxima = totals.vectors()
        self._layout.sum_over_batch(sums)
        self._layout.max_over_batch(maxima)
        reading = totals.read(sums, maxima, norm)
        reason = reason_to_skip(reading, self._training.max_logprob_gap)
        if reason is None:
            self._update(lr, norm)
        else:
            self._log.warning("optimizer step after %d is skipped: %s", self._optimizer_steps, reason)
        self._optimizer.zero_grad(set_to_none=True)
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
        assert self._head_kind == "policy", "a scalar head has no logprobs"
        if reference and self._training.lora is not None:
            with adapters_off(self._policy):
                return self._forward_tokens(self._policy, batch)
        model = self._reference if reference else self._policy
        assert model is not None, "the engine was made without a reference policy"
        return self._forward_tokens(model, batch)

    def refresh_reference(self) -> None:
        """See `TrainEngine`."""
        assert self._reference is not None, "the engine was made without a reference policy"
        with torch.no_grad():
            for name, weight in weights_of(self._reference).items():
                weight.copy_(self._weights[name])
        self._reference_moved = True

    def forward_values(self, batch: TrainBatch) -> FloatArray:
        """See `TrainEngine`."""
        assert self._head_kind == "scalar", "the engine was made without a scalar head"
        return self._forward_tokens(self._policy, batch)

    def _forward_tokens(self, model: PolicyModel, batch: TrainBatch) -> FloatArray:
        """Return [sum T] what the model gives for each loss-carrying token, 0 elsewhere, without gradient."""
        output = torch.zeros(len(batch.tokens), device=self._device)
        with torch.no_grad():
            for micro in self._micro_batches(batch):
                values, _ = self._forward(model, micro, False)
                output[micro.flat] = values[: micro.flat.numel()]
            self._layout.sum_over_batch(output)
        result: FloatArray = output.cpu().numpy()
        return result

    def gradients(self, batch: TrainBatch, loss_fn: LossFunction) -> dict[str, Tensor]:
        """Return the whole gradient of a step by weight name, before clipping, without making the step."""
        denominator = loss_fn.denominator(batch.loss_counts)
        for micro in self._micro_batches(batch):
            share, _ = loss_fn(self._view(micro, batch, loss_fn.needs_entropy), denominator)
            share.backward()
        self._finish_gradients()
        grads = {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}
        whole = {name: by_name(name, full(grad)).clone() for name, grad in grads.items()}
        self._optimizer.zero_grad(set_to_none=True)
        return whole

    def weight_specs(self, dtype: str) -> tuple[TensorSpec, ...]:
        """See `TrainEngine`."""
        return tuple(TensorSpec(name=weight.name, shape=weight.shape, dtype=dtype) for weight in self._published)

    def weight_tensors(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine`."""
        target = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        for weight in self._published:
            yield weight.name, weight.merged(full, target)

    def adapter_specs(self) -> tuple[TensorSpec, ...]:
        """See `TrainEngine`."""
        return adapter_specs(self._published)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine`."""
        return adapter_tensors(self._published, full)

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """See `TrainEngine`."""
        moved = self._reference if self._reference_moved else None
        reference = None if moved is None else weights_of(moved)
        return self._saver.begin(folder, self._trained, self._optimizer, self._optimizer_steps, reference)

    def save(self, folder: Path) -> None:
        """See `TrainEngine`."""
        self.begin_save(folder)()

    def load(self, folder: Path) -> None:
        """See `TrainEngine`."""
        is_there = self._reference is not None and state.holds_reference(folder)
        if self._reference_moved and not is_there:
            self._reference = self._build().model.requires_grad_(False)
        reference = weights_of(self._reference) if is_there and self._reference is not None else None
        self._optimizer_steps = state.load_state(folder, self._trained, self._optimizer, reference)
        self._reference_moved = is_there

    def export_hf(self, folder: Path) -> None:
        """See `TrainEngine`. Rank 0 writes; an existing folder is replaced."""
        gathered: dict[str, Tensor] = {}
        for name, tensor in self.weight_tensors("float32"):
            if self._rank == 0:
                gathered[name] = tensor.cpu()
        if self._rank == 0:
            changes = classifier_config(self._policy.lm) if self._head_kind == "scalar" else {}
            export_hf_folder(gathered, Path(self._model_config.path), folder, replace=True, config_changes=changes)

    def status(self) -> EngineStatus:
        """See `TrainEngine`."""
        return EngineStatus(
            optimizer_steps=self._optimizer_steps,
            num_parameters=sum(weight.numel() for weight in self._weights.values()),
            world_size=self._world_size,
            device=str(self._device),
        )

    def _build(self) -> BuiltPolicy:
        return build_policy(self._settings, self._layout, self._head, self._capacity)

    def _micro_batches(self, batch: TrainBatch) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this rank; the same number on every rank."""
        budget = self._training.micro_batch_tokens
        rows = plan_rows(batch, share=self._share_prompts, attention_cost=self._attention_cost, max_tokens=budget)
        parallel, packed = self._layout.parallel, self._packed
        plan = plan_micro_batches(row_lengths(rows), parallel.batch_ranks, budget, self._attention_cost, packed=packed)
        for at_once in zip(*plan.ranks, strict=True):
            of_ranks = [[rows[index] for index in indices] for indices in at_once]
            shapes = [micro_shape(of_rank, parallel.context, packed=packed) for of_rank in of_ranks]
            self._capacity.num_tokens = max(height * width // parallel.context for height, width in shapes)
            yield collate(batch, of_ranks[self._layout.batch_rank], self._device, parallel.context, packed=packed)

    def _forward(self, model: PolicyModel, micro: MicroBatch, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        # Sharded, the parameters themselves are gathered in the data type of the products.
        autocast = self._product_dtype != torch.float32 and self._world_size == 1
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=autocast):
            logprobs, entropy = model(micro, with_entropy)
        return logprobs, entropy

    def _view(self, micro: MicroBatch, batch: TrainBatch, with_entropy: bool) -> LossView:
        output, entropy = self._forward(self._policy, micro, with_entropy)
        return loss_view(micro, batch, output, entropy, self._head_kind)

    def _finish_gradients(self) -> None:
        sum_gradients(self._weights, self._summed_gradients, self._layout.group("tensor"))

    def _update(self, lr: float, norm: Tensor) -> None:
        clip(self._weights.values(), self._training.optimizer.max_grad_norm, norm)
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer_steps += 1
