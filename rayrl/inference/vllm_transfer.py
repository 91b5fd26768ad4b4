"""vLLM's side of a weight update: from shared memory into the model, in vLLM's worker process.

Names and fused layouts (qkv, gate and up) are mapped by vLLM's own loader; it expects the names of the model's files,
where each expert has tensors of its own. Nothing of the model is touched before the bytes are proven, so that a refused
update leaves the weights in use as they are.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rayrl.errors import TransferError
from rayrl.inference.shared_weights import SharedWeights, open_weights
from rayrl.inference.vllm_plugin import REFUSED
from rayrl.models.expert_names import as_in_files, names_in_files


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The fields of `SharedWeights`."""

    weights: dict[str, Any] = field(default_factory=dict)


class SharedMemoryTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads all weights of one version from shared memory, in one update."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do: there is no group to join."""

    def start_weight_update(self) -> None:
        """Nothing yet: vLLM's reload takes the model apart, which must wait until the bytes are proven."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Prove the bytes, then load all tensors."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        try:
            tensors = open_weights(SharedWeights(**update_info.weights))
        except (TransferError, OSError) as error:
            raise TransferError(f"{REFUSED}: {error}") from error
        _unpad_experts(self.model)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(
            (name, piece.to(self.device)) for name, piece in in_files(tensors, Path(self.model_config.model))
        )
        left = _left_out(self.model)
        if left:
            raise TransferError(
                f"vLLM's loader has taken nothing for {', '.join(left[:5])} ({len(left)} layers in all): their weights "
                f"came under names that it does not know, or not at all"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        _process_tied(self.model)
        _pack_experts(self.model)

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Nothing is held."""


def in_files(tensors: Mapping[str, Tensor], folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of the model under the names, and in the pieces, of the files in its folder."""
    stored = names_in_files(folder)
    for name, tensor in tensors.items():
        yield from as_in_files(name, tensor, stored)


def _left_out(model: Any) -> list[str]:
    """Return the layers whose weights would stay as they were; called before the reload is finished.

    vLLM only logs them. Layers that share the weight of another one are loaded with it. vllm 0.32.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded: set[int] = set()
    waiting: list[tuple[str, list[Tensor]]] = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            loaded.update(_addresses(layer._parameters.values()))
        elif info.loaded_weights:
            # The loader was called; a shard of padded rows alone takes none of what it was given.
            loaded.update(_addresses(info.kernel_tensors[0].values()))
        elif info.load_numel_total and info.kernel_tensors[0] and not is_deferred_attention_layer(layer):
            waiting.append((name, list(info.kernel_tensors[0].values())))
    return [name for name, weights in waiting if not set(_addresses(weights)) <= loaded]


def _addresses(weights: Iterable[Tensor | None]) -> Iterator[int]:
    return (weight.data_ptr() for weight in weights if weight is not None and weight.numel())


def _process_tied(model: Any) -> None:
    """Make again what layers derive from a weight that they share with an earlier one.

    Tied embeddings arrive once, so that vLLM's reload does not process the output head: on CPUs it would go on with the
    packed copy of the old weights. vllm 0.32.
    """
    seen: set[int] = set()
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        if weight.data_ptr() in seen and hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)
        seen.add(weight.data_ptr())


def _pack_experts(model: Any) -> None:
    """Bring the experts into the layout that kernels on CPUs read.

    vLLM does that when it loads a model, but not when weights are updated: its kernels would read the new ones as if
    they were packed. vllm 0.32.
    """
    for layer in _experts_on_cpus(model):
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _unpad_experts(model: Any) -> None:
    """Give experts that kernels on CPUs pad the size that is loaded; `_pack_experts` pads them again.

    vLLM's reload copies what it has loaded over what the kernels read, which does not fit. vllm 0.32.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.utils import replace_parameter

    for layer in _experts_on_cpus(model):
        for name, loaded in get_layerwise_info(layer).restore_metadata[0].items():
            held = getattr(layer, name)
            if held.shape != loaded.shape:
                replace_parameter(layer, name, held.new_empty(loaded.shape))


def _experts_on_cpus(model: Any) -> Iterator[Any]:
    for layer in model.modules():
        has_experts = hasattr(layer, "w13_weight") and hasattr(layer.quant_method, "moe_kernel")
        if has_experts and layer.w13_weight.device.type == "cpu":
            yield layer
