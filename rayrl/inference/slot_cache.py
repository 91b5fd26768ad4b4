"""Keys and values of the running sequences: one slot per row, of one static capacity that grows when needed.

Keys are stored transposed, positions innermost: on CPUs the product with one query per row is then about 1.5 times
as fast as with positions outermost.
"""

import torch

CAPACITY_STEP = 64


class SlotCache:
    """[L layers, N slots, H kv heads, positions, D] keys and values."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._max_context = max_context
        self._capacity = 0
        # Zeros, not empty: masked positions have probability 0, and 0 times an old NaN would still be NaN.
        self.keys = torch.zeros(num_layers, num_slots, num_kv_heads, key_dim, 0, dtype=dtype, device=device)
        self.values = torch.zeros(num_layers, num_slots, num_kv_heads, 0, value_dim, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Positions that each slot holds now."""
        return self._capacity

    def reserve(self, num_tokens: int) -> None:
        """Hold at least `num_tokens` positions per slot, at most the context of the model.

        It grows with what requests need instead of taking the whole context at once: 64 slots of 8192 positions of a
        model with 135 M parameters would be 24 GB.
        """
        if num_tokens <= self._capacity:
            return
        rounded = -(-max(num_tokens, 2 * self._capacity) // CAPACITY_STEP) * CAPACITY_STEP
        capacity = min(self._max_context, rounded)
        assert num_tokens <= capacity, "the length of requests is checked when they arrive"
        grow = capacity - self._capacity
        self.keys = torch.nn.functional.pad(self.keys, (0, grow))
        self.values = torch.nn.functional.pad(self.values, (0, 0, 0, grow))
        self._capacity = capacity

    def copy(self, source: int, first: int, last: int, num_tokens: int) -> None:
        """Copy the first positions of slot `source` into the slots `first` .. `last - 1`."""
        self.keys[:, first:last, ..., :num_tokens] = self.keys[:, source : source + 1, ..., :num_tokens]
        self.values[:, first:last, :, :num_tokens] = self.values[:, source : source + 1, :, :num_tokens]

    def clear(self, slot: int) -> None:
        """Set a slot to zeros."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0
