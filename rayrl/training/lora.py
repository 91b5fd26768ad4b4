"""LoRA through peft: low-rank adapters beside frozen weights (Hu et al. 2021, arXiv:2106.09685).

    y = W x + (alpha / r) B A x        A random, B zero at the start

Only A and B are trained and saved. Export, and publication with `transfer.lora: merged`, give merged weights
`W + (alpha / r) B A` under the model's own names, so that inference engines and readers of the export need not know of
adapters; with `transfer.lora: adapters` A and B alone are published, and engines add them to the W of their model
folder. With the adapters switched off the model is the one that training started from: the reference policy.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rayrl.config.training import LoraConfig
from rayrl.errors import EngineError, ModelError
from rayrl.infra.buckets import TensorSpec
from rayrl.models.adapters import adapter_names, merged_weight
from rayrl.training.expert_halves import by_name, whole_shape
from rayrl.training.scalar_head import HEAD
from rayrl.utils.nearest import did_you_mean

_ADAPTER = "default"
_SEED = 0
"""Of A: the same on every rank and in every run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedWeight:
    """A weight by its name in the model's own files, and what is added to it."""

    name: str
    weight: nn.Parameter
    shape: tuple[int, ...]
    adapter: tuple[nn.Parameter, nn.Parameter] | None = None
    """A [r, in] and B [out, r]."""
    adapter_shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Of A and B as a whole."""
    scaling: float = 0.0

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """What `merged` reads."""
        return (self.weight, *(self.adapter or ()))

    def merged(self, full: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """Return the whole weight in `dtype`, given what makes a tensor whole. May be the parameter itself."""
        if self.adapter is None:
            # Cast before the gather: half the traffic in bfloat16.
            return by_name(self.name, full(self.weight.detach().to(dtype)))
        down, up = (full(part.detach()) for part in self.adapter)
        return merged_weight(full(self.weight.detach()), down, up, self.scaling).to(dtype)


def attach_lora(lm: Any, config: LoraConfig) -> None:
    """Put adapters beside the target modules of `lm` and freeze all else, but for a scalar head.

    EngineError if peft is not installed, ModelError if a target matches no linear layer.
    """
    check_targets(lm, config.target_modules)
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise EngineError(f"training.lora needs peft: pip install 'rayrl[lora]' ({error})") from error
    options = PeftConfig(r=config.r, lora_alpha=config.alpha, target_modules=list(config.target_modules))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        inject_adapter_in_model(options, lm, adapter_name=_ADAPTER)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.startswith(f"{HEAD}."))
    lm.eval()


def check_targets(lm: Any, targets: tuple[str, ...]) -> None:
    """ModelError if one of the targets is the name of no linear layer, with the names that there are.

    Output heads are none of them: training computes logits in chunks from the weight of the head, and an adapter
    beside it would stay without gradient.
    """
    heads = (lm.get_output_embeddings(), vars(lm)["_modules"].get(HEAD))
    names = [name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module not in heads]
    known = sorted({name.rpartition(".")[2] for name in names})
    unknown = [target for target in targets if not any(name == target or name.endswith(f".{target}") for name in names)]
    if unknown:
        raise ModelError(
            f"training.lora.target_modules: {unknown} match no linear layer of {type(lm).__name__} that can "
            f"be adapted{did_you_mean(unknown[0], known)}; it has {known}"
        )


def adapter_parts(module: Any) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """Return the layer of the model, and A and B beside it; None for both if it is not adapted."""
    if not hasattr(module, "base_layer"):
        return module, None, None
    return module.base_layer, module.lora_A[_ADAPTER], module.lora_B[_ADAPTER]


@contextmanager
def adapters_off(lm: nn.Module) -> Iterator[None]:
    """Compute without adapters inside the block.

    By the flag that their forward reads: peft's public switch also takes the gradient from the parameters, and a
    sharded engine that gathers them for the first time in that state would never train them.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def published_weights(lm: nn.Module) -> tuple[PublishedWeight, ...]:
    """Return the weights by the names of the model's own files, tied ones once, in the model's order."""
    return tuple(_published(lm, name, parameter) for name, parameter in lm.named_parameters() if ".lora_" not in name)


def _published(lm: nn.Module, name: str, parameter: nn.Parameter) -> PublishedWeight:
    owner, mark, kind = name.rpartition(".base_layer.")
    if not mark:
        return PublishedWeight(name=name, weight=parameter, shape=whole_shape(name, parameter))
    own_name = f"{owner}.{kind}"
    if kind != "weight":
        return PublishedWeight(name=own_name, weight=parameter, shape=tuple(parameter.shape))
    module: Any = lm.get_submodule(owner)
    down, up = module.lora_A[_ADAPTER].weight, module.lora_B[_ADAPTER].weight
    return PublishedWeight(
        name=own_name,
        weight=parameter,
        shape=tuple(parameter.shape),
        adapter=(down, up),
        adapter_shapes=(tuple(down.shape), tuple(up.shape)),
        scaling=module.scaling[_ADAPTER],
    )


def adapter_specs(weights: Iterable[PublishedWeight]) -> tuple[TensorSpec, ...]:
    """Return A and B of each adapted weight in the order of `adapter_tensors`; float32, whatever engines compute in."""
    return tuple(
        TensorSpec(name=name, shape=shape, dtype="float32")
        for weight in weights
        if weight.adapter is not None
        for name, shape in zip(adapter_names(weight.name), weight.adapter_shapes, strict=True)
    )


def adapter_tensors(
    weights: Iterable[PublishedWeight], full: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of each adapted weight, given what makes a tensor whole."""
    for weight in weights:
        if weight.adapter is not None:
            for name, part in zip(adapter_names(weight.name), weight.adapter, strict=True):
                yield name, full(part.detach()).float()


def trained(weights: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the weights that are trained, and therefore saved; frozen ones are those of the model folder."""
    return {name: weight for name, weight in weights.items() if weight.requires_grad}
