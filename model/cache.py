"""Key/value cache: keep the keys and values of past tokens, so that each token is computed once.

In a stored tensor, dimension 0 is the sequence and dimension 2 is the position. Prompts that are
shorter than the longest are padded on the right; new tokens overwrite the padding.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention import fused_attention
from model.config import LMConfig

# A new cache has few positions, a multiple of STRETCH: max_seq_len of them may take gigabytes.
STRETCH = 64  # a multiple of 16: a GPU would copy a mask of another length


class LayerCache:
    """The keys and values of one block, each (B, n_kv_heads, allocated positions, head_dim)."""

    def __init__(self, cache: "Cache", keys: Tensor, values: Tensor):
        self.cache = weakref.ref(cache)  # a reference cycle would keep a dropped cache in memory
        self.keys, self.values = keys, values

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, (B, T, n_kv_heads, head_dim). Let each position attend to itself and the
        past. q and the result are (B, T, H, head_dim). T is 1, except while prompts are read."""
        cache, keys, values = self.cache(), self.keys, self.values
        if cache.longest == 0:  # the model reads the prompts
            keys[:, :, : k.shape[1]] = k.transpose(1, 2)
            values[:, :, : k.shape[1]] = v.transpose(1, 2)
            return fused_attention(q, k, v, 0.0)
        if cache.mask is None:  # all sequences have the same length: write one column
            keys.select(2, cache.longest - 1).copy_(k[:, 0])
            values.select(2, cache.longest - 1).copy_(v[:, 0])
        else:
            keys[cache.rows, :, cache.columns] = k[:, 0]
            values[cache.rows, :, cache.columns] = v[:, 0]
        # Group the query heads that share a key/value head: (B, n_kv_heads, group, head_dim).
        grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])
        width = cache.longest if cache.mask is None else cache.mask.shape[-1]
        keys, values = keys.narrow(2, 0, width), values.narrow(2, 0, width)
        out = F.scaled_dot_product_attention(grouped, keys, values, cache.mask)
        return out.reshape(q.shape)  # on a GPU `out` may have other strides than q


class Cache:
    """The cache of all blocks. A full cache doubles, up to max_seq_len positions. `lengths` counts
    each prompt's tokens. The first pass reads the prompts. Call `advance` before later passes."""

    def __init__(
        self, config: LMConfig, lengths: list[int], dtype: torch.dtype, device: torch.device
    ):
        self.device, self.context = device, config.max_seq_len
        self.allocated = min((max(lengths) // STRETCH + 2) * STRETCH, self.context)  # positions
        self.fixed = False  # True: passes have equal shapes, so a CUDA graph can hold a pass
        shape = (2, len(lengths), config.n_kv_heads, self.allocated, config.head_dim)
        self.layers = [
            LayerCache(self, *torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.n_layers)
        ]
        self._set_lengths(lengths)
        self.longest = 0  # nothing is stored until the prompts are read

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.longest = max(lengths)  # tokens of the longest sequence
        self.rows = torch.arange(len(lengths), device=self.device)
        self.columns = torch.tensor(lengths, device=self.device)  # next position of each sequence
        self.equal_lengths = min(lengths) == self.longest
        # (B, 1, 1, positions), True where the new token attends; None if it attends everywhere
        self.mask: Tensor | None = None
        self.replay: Callable[[Tensor], Tensor] | None = None  # runs the CUDA graph

    def advance(self) -> None:
        """Make room for a token per sequence. Raises ValueError if the context is full."""
        if self.longest == self.allocated:
            if self.allocated == self.context:
                raise ValueError(f"a sequence fills the context of {self.context} tokens")
            self._allocate(min(2 * self.allocated, self.context))
            self._set_lengths(self.lengths)  # drop the CUDA graph: it uses the old addresses
        self.lengths = [length + 1 for length in self.lengths]
        self.longest += 1

    def begin(self, pos_cis: Tensor, seq_len: int) -> Tensor:
        """Return the rotations of the new tokens, (seq_len, head_dim/2) or (B, 1, head_dim/2)."""
        if self.longest == 0:
            return pos_cis[:seq_len]
        if self.equal_lengths and not self.fixed:
            return pos_cis[self.longest - 1 : self.longest]
        columns = torch.arange(self.allocated if self.fixed else self.longest, device=self.device)
        self.mask = (columns <= self.columns[:, None])[:, None, None]
        return pos_cis[self.columns][:, None]

    def end(self, x: Tensor) -> Tensor:
        """Return x of the last token of each sequence, (B, dim)."""
        if self.longest == 0:
            self.longest = max(self.lengths)
            return x[self.rows, self.columns - 1]
        if self.mask is not None:
            self.columns += 1
        return x[:, 0]

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Keep only the sequences with these indices, in this order."""
        index = torch.tensor(rows, device=self.device)  # one copy to a GPU, not two per layer
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]
        self._set_lengths([self.lengths[row] for row in rows])

    @torch.inference_mode()
    def append(self, other: "Cache") -> None:
        """Append the sequences of another cache as the last rows."""
        for cache in (self, other):
            cache._allocate(max(self.allocated, other.allocated))
        for mine, new in zip(self.layers, other.layers, strict=True):
            mine.keys = torch.cat([mine.keys, new.keys])
            mine.values = torch.cat([mine.values, new.values])
        self._set_lengths(self.lengths + other.lengths)

    def _allocate(self, positions: int) -> None:
        padding = (0, 0, 0, positions - self.allocated)  # after the last position
        for layer in self.layers:
            layer.keys, layer.values = F.pad(layer.keys, padding), F.pad(layer.values, padding)
        self.allocated = positions


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Switch cuDNN's attention off, because it prepares a new plan for every new length.

    PyTorch prefers cuDNN for 16 bits on compute capability 9 and 10 (H100, H200, B200). PyTorch's
    `sdpa_kernel` would do the same, but is several times slower than this switch."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
