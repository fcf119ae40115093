"""Keys and values of the tokens that a model has read, so that each token is computed once.

Column t of a row belongs to position t of that sequence. Shorter prompts are padded on the right;
the tokens that follow are written over the padding.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention import fused_attention
from model.config import LMConfig

STRETCH = 64  # positions beyond the prompts at first; a long context takes gigabytes


class LayerCache:
    """The keys and values of one block, (B, n_kv_heads, room, head_dim) each."""

    def __init__(self, cache: "Cache", keys: Tensor, values: Tensor):
        self.cache, self.keys, self.values = cache, keys, values

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, (B, T, n_kv_heads, head_dim), and attend to everything that is stored.

        q and the result are (B, T, H, head_dim). T is 1 but for the prompts of an empty cache.
        """
        cache, keys, values = self.cache, self.keys, self.values
        if cache.longest == 0:
            keys[:, :, : k.shape[1]] = k.transpose(1, 2)
            values[:, :, : k.shape[1]] = v.transpose(1, 2)
            return fused_attention(q, k, v, 0.0)
        if cache.mask is None:
            keys.select(2, cache.longest).copy_(k[:, 0])
            values.select(2, cache.longest).copy_(v[:, 0])
        else:
            keys[cache.rows, :, cache.columns] = k[:, 0]
            values[cache.rows, :, cache.columns] = v[:, 0]
        # The query heads that share a key/value head are the rows of one matrix.
        grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])
        n = cache.longest + 1
        keys, values = keys.narrow(2, 0, n), values.narrow(2, 0, n)
        return F.scaled_dot_product_attention(grouped, keys, values, cache.mask).view(q.shape)


class Cache:
    """The cache of a whole model. It grows with its sequences up to max_seq_len.

    Args:
        lengths: tokens of each prompt that is to be read first.
    """

    def __init__(
        self, config: LMConfig, lengths: list[int], dtype: torch.dtype, device: torch.device
    ):
        self.device, self.context = device, config.max_seq_len
        self.room = min(max(lengths) + STRETCH, self.context)  # positions of each sequence
        shape = (2, len(lengths), config.n_kv_heads, self.room, config.head_dim)
        self.layers = [
            LayerCache(self, *torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.n_layers)
        ]
        self._set_lengths(lengths)
        self.longest = 0  # tokens of the longest sequence that are stored

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths, self.longest = lengths, max(lengths)
        self.rows = torch.arange(len(lengths), device=self.device)
        self.columns = torch.tensor(lengths, device=self.device)  # where the next tokens go
        self.even = min(lengths) == self.longest
        self.mask: Tensor | None = None  # (B, 1, 1, columns), true where the next token looks

    def begin(self, pos_cis: Tensor, seq_len: int) -> Tensor:
        """Return the rows of pos_cis for the next tokens, (seq_len, head_dim/2), or (B, 1,
        head_dim/2) where sequences differ in length. Raises ValueError: the context is full."""
        if self.longest == 0:
            return pos_cis[:seq_len]
        if self.longest == self.room:
            if self.room == self.context:
                raise ValueError(f"a sequence fills the context of {self.context} tokens")
            self._make_room(min(2 * self.room, self.context))
        if self.even:
            return pos_cis[self.longest : self.longest + 1]
        columns = torch.arange(self.longest + 1, device=self.device)
        self.mask = (columns <= self.columns[:, None])[:, None, None]
        return pos_cis[self.columns][:, None]

    def end(self, x: Tensor) -> Tensor:
        """Count the tokens as stored; return the last row of each sequence in x, (B, dim)."""
        if self.longest == 0:
            self.longest = max(self.lengths)
            return x[self.rows, self.columns - 1]
        self.lengths = [length + 1 for length in self.lengths]
        self.longest += 1
        if not self.even:
            self.columns += 1
        return x[:, 0]

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Go on with these sequences only, in this order."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self._set_lengths([self.lengths[row] for row in rows])

    @torch.inference_mode()
    def append(self, other: "Cache") -> None:
        """Add the sequences of another cache as the last rows."""
        for cache in (self, other):
            cache._make_room(max(self.room, other.room))
        for mine, new in zip(self.layers, other.layers, strict=True):
            mine.keys = torch.cat([mine.keys, new.keys])
            mine.values = torch.cat([mine.values, new.values])
        self._set_lengths(self.lengths + other.lengths)

    def _make_room(self, room: int) -> None:
        more = (0, 0, 0, room - self.room)
        for layer in self.layers:
            layer.keys, layer.values = F.pad(layer.keys, more), F.pad(layer.values, more)
        self.room = room


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Leave out cuDNN's attention, which makes a plan for every new length.

    PyTorch prefers it in 16 bits on compute capability 9 and 10 (H100, H200, B200). (`sdpa_kernel`
    can do this too, but takes several times as long at every token.)
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
