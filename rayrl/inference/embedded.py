"""The embedded engine: transformers models with continuous batching over a static cache.

The model's own code runs unchanged, with the attention of `slot_attention`. Each step is one forward pass over one
flat row of tokens, for running sequences and new prompts alike. Transformers' own continuous batching was measured
first: 70 tokens/s against 180 of its `generate` (SmolLM2-135M, float32, 32 requests, two CPU cores); this engine is
2 to 3 times as fast as `generate` where groups share their prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayrl.config.inference import InferenceConfig, TransformersEngine
from rayrl.config.model import ModelConfig
from rayrl.errors import EngineError, ModelError
from rayrl.inference.engine import WeightSpec
from rayrl.inference.request_check import ModelLimits
from rayrl.inference.sampling import SamplingTable, sample, uniforms
from rayrl.inference.scheduler import PromptGroup
from rayrl.inference.scheduler import Sequence as RunningSequence
from rayrl.inference.slot_attention import ATTENTION_NAME, ShapeProbe, SlotPass, register_slot_attention
from rayrl.inference.slot_cache import SlotCache
from rayrl.inference.step_gate import StepGate
from rayrl.inference.threaded import ThreadedEngine
from rayrl.inference.weights import adopt_weights, check_weights, checksums, load_weights, named_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the embedded engine runs."""

    model: Any
    """A causal language model of transformers, in evaluation mode, with attention `rayrl_slots`."""
    max_context: int
    eos_token_ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str] | None
    """Text of tokens, for stop strings."""


class EmbeddedModel:
    """Implements `TokenModel` on a model of transformers."""

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        *,
        max_batch_size: int,
        num_threads: int = 1,
        device: str = "cpu",
        deterministic: bool = False,
    ) -> None:
        """`load` is called in the engine's thread; `deterministic` sends each sequence through the model alone."""
        self._load = load
        self._max_batch_size = max_batch_size
        self._num_threads = num_threads
        self._device = torch.device(device)
        self._deterministic = deterministic
        self._rows: list[RunningSequence] = []
        self._table: SamplingTable | None = None

    @property
    def limits(self) -> ModelLimits:
        """Of the loaded model."""
        return self._limits

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights in use, by name."""
        return self._weights

    def open(self) -> None:
        """Load the model, and find out with a first pass what it needs of a cache."""
        # Per thread: torch's setting is not inherited by a thread that already computed something.
        torch.set_num_threads(self._num_threads)
        loaded = self._load()
        self._model = loaded.model.to(self._device)
        self._weights = named_weights(self._model)
        self._decode = loaded.decode
        self._eos_token_ids = frozenset(loaded.eos_token_ids)
        self._limits = ModelLimits(
            max_context=loaded.max_context,
            vocab_size=self._model.get_input_embeddings().num_embeddings,
            can_decode=loaded.decode is not None,
        )
        self._cache = self._make_cache(loaded.max_context)

    def ends(self, sequence: RunningSequence) -> bool:
        """Return whether the newest token is an end-of-sequence id."""
        return sequence.tokens[-1] in self._eos_token_ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`."""
        assert self._decode is not None, "checked when the request arrived"
        return self._decode(tokens)

    @torch.inference_mode()
    def step(self, rows: list[RunningSequence], groups: list[PromptGroup]) -> tuple[list[int], list[float]]:
        """Run one forward pass, copy shared prompts to all members of their groups, and sample one token per row."""
        if self._deterministic:
            return self._step_alone(rows, groups)
        logits = self._forward(rows, groups)
        positions = np.fromiter((row.num_context for row in rows), np.int64, len(rows))
        if self._table is None or groups or rows != self._rows:
            self._rows = list(rows)
            self._table = self._make_table(rows)
            self._seeds = np.fromiter((row.seed for row in rows), np.uint64, len(rows))
        self._ban_early_stops(logits, rows)
        uniform = torch.from_numpy(uniforms(self._seeds, positions)).to(self._device)
        tokens, logprobs = sample(logits, self._table, uniform)
        # float64 holds every token id and every float32: one transfer for both.
        both = torch.stack((tokens.double(), logprobs.double())).tolist()
        return [int(token) for token in both[0]], both[1]

    def _step_alone(self, rows: list[RunningSequence], groups: list[PromptGroup]) -> tuple[list[int], list[float]]:
        """As `step`, one pass for each row and each prompt.

        The shape of a matrix product decides in which order its sums are rounded. Here all shapes follow from the
        sequence itself, so that its logprobs do not depend on which other requests happen to run.
        """
        num_decode = len(rows) - sum(group.num_members for group in groups)
        parts = [self._forward([row], [], slot) for slot, row in enumerate(rows[:num_decode])]
        slot = num_decode
        for group in groups:
            parts.append(self._forward(rows[slot : slot + group.num_members], [group], slot))
            slot += group.num_members
        logits = torch.cat(parts)
        self._ban_early_stops(logits, rows)
        tokens: list[int] = []
        logprobs: list[float] = []
        for index, row in enumerate(rows):
            seed, position = np.array([row.seed], np.uint64), np.array([row.num_context], np.int64)
            uniform = torch.from_numpy(uniforms(seed, position)).to(self._device)
            token, logprob = sample(logits[index : index + 1].clone(), self._make_table([row]), uniform)
            tokens.append(int(token))
            logprobs.append(float(logprob))
        return tokens, logprobs

    @torch.inference_mode()
    def move_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy a slot."""
        self._cache.copy(source, target, target + 1, num_tokens)

    @torch.inference_mode()
    def clear_row(self, row: int) -> None:
        """Zero a slot."""
        self._cache.clear(row)

    def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        """EngineError with the first difference if `load` would not take these."""
        check_weights(self._weights, specs)

    def load(self, tensors: Mapping[str, Tensor], *, may_keep: bool = False) -> bool:
        """Take the new tensors in place of the old ones if they may be kept, else copy them."""
        if may_keep and self._device.type == "cpu":
            adopt_weights(self._weights, tensors)
            return True
        load_weights(self._weights, tensors)
        return False

    def checksums(self, specs: Sequence[WeightSpec]) -> Mapping[str, str]:
        """Return the checksums of the weights in use."""
        return checksums(self._weights, specs)

    def _forward(self, rows: list[RunningSequence], groups: list[PromptGroup], first_slot: int = 0) -> Tensor:
        """Return [N, V] float32 logits of the next token of each row; the rows are slots `first_slot` and following."""
        num_decode = len(rows) - sum(group.num_members for group in groups)
        tokens = [row.tokens[-1] for row in rows[:num_decode]]
        positions = [row.num_context - 1 for row in rows[:num_decode]]
        slots = list(range(first_slot, first_slot + num_decode))
        prompts: list[tuple[int, int]] = []
        first_slots: list[int] = []
        slot = first_slot + num_decode
        for group in groups:
            length = len(group.prompt_tokens)
            prompts.append((len(tokens), len(tokens) + length))
            tokens += group.prompt_tokens
            positions += range(length)
            slots += [slot] * length
            first_slots.append(slot)
            slot += group.num_members
        self._cache.reserve(max(positions) + 1)
        index = torch.tensor((tokens, positions, slots), device=self._device)
        attend = SlotPass(
            cache=self._cache,
            slots=index[2],
            positions=index[1],
            num_decode=num_decode,
            first_slot=first_slot,
            copies=self._deterministic,
            num_positions=max(positions[:num_decode], default=-1) + 1,
            mask=self._mask(index[1, :num_decode], max(positions[:num_decode], default=-1) + 1),
            prompts=tuple(prompts),
        )
        # Logits for the decode tokens, and for the last token of each prompt only.
        wanted = torch.tensor([*range(num_decode), *(end - 1 for _, end in prompts)], device=self._device)
        logits = self._run(index[0:1], index[1:2], attend, wanted if groups else 0)
        for group, first in zip(groups, first_slots, strict=True):
            if group.num_members > 1:
                self._cache.copy(first, first + 1, first + group.num_members, len(group.prompt_tokens))
        if groups:
            members = torch.tensor([1] * num_decode + [group.num_members for group in groups], device=self._device)
            logits = logits.repeat_interleave(members, dim=0)
        return logits.float()

    def _run(self, tokens: Tensor, positions: Tensor, attend: Any, logits_to_keep: Tensor | int) -> Tensor:
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=logits_to_keep,
            attend=attend,
        )
        return output.logits[0]

    def _mask(self, positions: Tensor, num_positions: int) -> Tensor:
        beyond = torch.arange(num_positions, device=self._device) > positions.unsqueeze(1)
        mask = torch.zeros(beyond.shape, dtype=self._cache.keys.dtype, device=self._device)
        mask.masked_fill_(beyond, -torch.inf)
        return mask.repeat_interleave(self._num_kv_heads, dim=0).unsqueeze(1)

    def _ban_early_stops(self, logits: Tensor, rows: list[RunningSequence]) -> None:
        for row, sequence in enumerate(rows):
            params = sequence.request.params
            if len(sequence.tokens) < params.min_new_tokens:
                logits[row, [*self._eos_token_ids, *params.stop_token_ids]] = -torch.inf

    def _make_table(self, rows: list[RunningSequence]) -> SamplingTable:
        params = [row.request.params for row in rows]
        filtered = [row for row, item in enumerate(params) if item.top_k > 0 or item.top_p < 1]
        greedy = [item.temperature == 0 for item in params]
        return SamplingTable(
            temperature=torch.tensor([[item.temperature or 1.0] for item in params], device=self._device),
            greedy=torch.tensor(greedy, device=self._device),
            any_greedy=any(greedy),
            filtered_rows=torch.tensor(filtered, dtype=torch.int64, device=self._device),
            top_k=torch.tensor([[params[row].top_k] for row in filtered], device=self._device),
            top_p=torch.tensor([[params[row].top_p] for row in filtered], device=self._device),
        )

    @torch.inference_mode()
    def _make_cache(self, max_context: int) -> SlotCache:
        probe = ShapeProbe()
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        name = type(self._model).__name__
        try:
            logits = self._run(tokens, tokens, probe, 0)
        except EngineError as error:
            raise ModelError(f"{name}: {error}; use another inference.engine") from error
        num_layers = self._model.config.num_hidden_layers
        shapes = set(probe.shapes.values())
        if sorted(probe.shapes) != list(range(num_layers)) or len(shapes) != 1:
            raise ModelError(
                f"the embedded engine cannot run {name}: it needs the same attention in each of the {num_layers} "
                f"layers and found {len(shapes)} shapes in {len(probe.shapes)} layers; use another inference.engine"
            )
        self._num_kv_heads, key_dim, value_dim = shapes.pop()
        return SlotCache(
            num_layers=num_layers,
            num_slots=self._max_batch_size,
            num_kv_heads=self._num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            max_context=max_context,
            dtype=logits.dtype,
            device=self._device,
        )


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the model of a folder for the embedded engine. ModelError if that cannot be done."""
    from rayrl.models.context import context_limit
    from rayrl.models.loading import load_causal_lm
    from rayrl.models.tokenizer import load_tokenizer

    register_slot_attention()
    dtype: torch.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    tokenizer = load_tokenizer(config.path, trust_remote_code=config.trust_remote_code)
    return LoadedModel(
        model=load_causal_lm(
            config.path, dtype=dtype, attention=ATTENTION_NAME, trust_remote_code=config.trust_remote_code
        ),
        max_context=context_limit(config),
        eos_token_ids=tokenizer.eos_token_ids,
        decode=tokenizer.decode,
    )


def embedded_engine(
    load: Callable[[], LoadedModel],
    config: InferenceConfig,
    *,
    name: str = "embedded",
    seed: int = 0,
    gate: StepGate | None = None,
    deterministic: bool = False,
) -> ThreadedEngine:
    """Return an engine on the model that `load` gives; with a gate it takes only the steps that the gate allows.

    `deterministic`: what a request gets is a function of its tokens, its seed and the weights, bit by bit.
    """
    engine = config.engine
    assert isinstance(engine, TransformersEngine), f"engine type is {engine.type}"
    model = EmbeddedModel(
        load,
        max_batch_size=engine.max_batch_size,
        num_threads=config.threads_per_engine,
        device="cuda" if config.gpus_per_engine > 0 else "cpu",
        deterministic=deterministic,
    )
    return ThreadedEngine(
        model,
        config,
        max_batch_size=engine.max_batch_size,
        prefill_tokens=engine.prefill_tokens,
        name=name,
        seed=seed,
        gate=gate,
    )
