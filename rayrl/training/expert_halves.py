"""The matrix `gate_up_proj` of experts, whose rows are those of two matrices, split over the axis `tensor`.

    by its name, everywhere else     [experts, 2 x width, hidden]         first all rows of gate, then all rows of up
    halved, with `expert_tensor`     [experts, 2, width, hidden]          the same numbers in the same order
    on a rank                        [experts, 2, width / n, hidden]      its rows of gate and its rows of up

The engine keeps the halved parameter, whose split is one of an ordinary dimension. It is made whole, and given its own
shape again, where weights or gradients leave the engine.
"""

from torch import Tensor

_NAME = ".experts.gate_up_proj"


def is_halved(name: str, tensor: Tensor) -> bool:
    """Return whether a weight, or one of its moments, is kept in halves; `name` may have a prefix."""
    return name.endswith(_NAME) and tensor.dim() == 4


def whole_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """Return the shape that the model's own code and files give to a weight of that name."""
    if not is_halved(name, tensor):
        return tuple(tensor.shape)
    experts, halves, width, hidden = tensor.shape
    return (experts, halves * width, hidden)


def by_name(name: str, whole: Tensor) -> Tensor:
    """Return a whole weight in that shape; of the same memory."""
    return whole.flatten(1, 2) if is_halved(name, whole) else whole


def half_regions(shape: tuple[int, ...], region: tuple[slice, ...]) -> list[tuple[slice, ...]]:
    """Return which two parts of a tensor of `whole_shape` are a region of the halved one of `shape`."""
    experts, halves, rows, columns = region
    assert (halves.start, halves.stop) == (0, 2), "no axis divides the halves"
    width = shape[2]
    return [
        (experts, slice(half * width + rows.start, half * width + rows.stop), columns) for half in range(halves.stop)
    ]
