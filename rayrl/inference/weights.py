"""The weights of a model by name: what an engine expects, and how new ones are put in."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rayrl.errors import EngineError
from rayrl.inference.engine import WeightSpec
from rayrl.infra.weight_manifest import checksum_of
from rayrl.utils.nearest import did_you_mean


def named_weights(model: Any) -> dict[str, Tensor]:
    """Return the parameters of a model by name, tied ones once."""
    return dict(model.named_parameters())


def check_weights(expected: Mapping[str, Tensor], given: Iterable[WeightSpec]) -> None:
    """EngineError with the first difference between what a model has and what is to be loaded."""
    specs = {name: (tuple(shape), dtype) for name, shape, dtype in given}
    for name, tensor in expected.items():
        if name not in specs:
            raise EngineError(
                f"weights lack {name!r}, which the engine's model has; it has {len(expected)}, {len(specs)} were given"
            )
        shape, dtype = specs[name]
        if shape != tuple(tensor.shape):
            raise EngineError(f"weight {name!r} has shape {shape}; in the engine it has {tuple(tensor.shape)}")
        if dtype != dtype_name(tensor):
            raise EngineError(f"weight {name!r} is {dtype}; in the engine it is {dtype_name(tensor)} (model.dtype)")
    unknown = next((name for name in specs if name not in expected), None)
    if unknown is not None:
        raise EngineError(f"weight {unknown!r} is unknown to the engine's model{did_you_mean(unknown, expected)}")


def load_weights(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy all weights in place. EngineError, and no change, if one differs."""
    check_weights(expected, ((name, tuple(tensor.shape), dtype_name(tensor)) for name, tensor in tensors.items()))
    with torch.no_grad():
        for name, target in expected.items():
            target.copy_(tensors[name])


def adopt_weights(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Let all weights be the given tensors themselves. EngineError, and no change, if one differs."""
    check_weights(expected, ((name, tuple(tensor.shape), dtype_name(tensor)) for name, tensor in tensors.items()))
    for name, target in expected.items():
        target.data = tensors[name]


def checksums(weights: Mapping[str, Tensor], specs: Iterable[WeightSpec]) -> dict[str, str]:
    """Return the checksums of those named weights that are held in the very shape and data type of their spec."""
    return {
        name: checksum_of(weights[name])
        for name, shape, dtype in specs
        if name in weights and (tuple(weights[name].shape), dtype_name(weights[name])) == (tuple(shape), dtype)
    }


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of the data type, without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")
