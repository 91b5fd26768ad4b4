"""Between the flat columns of a batch and [N, S] tensors of its loss-carrying tokens, side by side as losses see them.

flat      [ prompt a a a | prompt b ]     loss mask [ 0 1 1 1 | 0 1 ]
columns   [[a, a, a], [b, 0, 0]]
"""

import numpy as np
import torch
from torch import Tensor

from rayrl.training.batch import FloatArray, TrainBatch


def columns_mask(batch: TrainBatch) -> Tensor:
    """Return [N, S] bool, True where a column holds a loss-carrying token; S is at least 1."""
    counts = torch.from_numpy(batch.loss_counts)
    width = max(int(counts.max()) if len(counts) else 0, 1)
    return torch.arange(width)[None, :] < counts[:, None]


def to_columns(batch: TrainBatch, flat: FloatArray) -> Tensor:
    """Return the values [sum T] of the loss-carrying tokens as float32 [N, S], 0 where the mask is."""
    mask = columns_mask(batch)
    columns = torch.zeros(mask.shape)
    # Both sides are in the order of trajectories, then of tokens.
    columns[mask] = torch.from_numpy(flat[batch.loss_mask != 0].astype(np.float32))
    return columns


def to_flat(batch: TrainBatch, columns: Tensor) -> FloatArray:
    """Return [N, S], or [N, 1] for one value per trajectory, as [sum T]; 0 where the token carries no loss."""
    mask = columns_mask(batch)
    flat = np.zeros(len(batch.tokens), dtype=np.float32)
    flat[batch.loss_mask != 0] = columns.expand(mask.shape)[mask].numpy().astype(np.float32)
    return flat
