"""What rayrl adds to vLLM's worker class: a look at the weights as the worker holds them."""

from typing import Any

from rayrl.infra.weight_manifest import checksum_of


class WeightChecksums:
    """Mixed into vLLM's worker by `worker_extension_cls`; called by name through `collective_rpc`. vllm 0.32."""

    model_runner: Any

    def rayrl_weight_checksums(self, specs: list[tuple[str, list[int], str]]) -> dict[str, str]:
        """Return the checksums of the weights that this worker holds under their names, whole and as they came.

        Fused weights (qkv, gate and up) are found by their parts. Shards, and what kernels keep packed, are left out.
        """
        held = dict(self.model_runner.model.named_parameters())
        found: dict[str, str] = {}
        for name, shape, dtype in specs:
            tensor = held[name] if name in held else _part(self.model_runner.model, held, name)
            if tensor is None or list(tensor.shape) != list(shape):
                continue
            if str(tensor.dtype).removeprefix("torch.") == dtype:
                found[name] = checksum_of(tensor)
        return found


_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def _part(model: Any, held: dict[str, Any], name: str) -> Any:
    """Return the rows of a fused weight that are `name`, or None if this model has no such weight."""
    parts = name.split(".")
    if len(parts) < 3 or parts[-2] not in _FUSED:
        return None
    fused, index = _FUSED[parts[-2]]
    owner = ".".join((*parts[:-2], fused))
    whole = held.get(f"{owner}.{parts[-1]}")
    if whole is None:
        return None
    sizes = list(model.get_submodule(owner).output_partition_sizes)
    if index >= len(sizes) or whole.shape[0] != sum(sizes):
        return None
    start = sum(sizes[:index])
    return whole[start : start + sizes[index]]
