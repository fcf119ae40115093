"""Keys and values of the tokens that a model has read, so that each token is computed once.

Column t of a row belongs to position t of that sequence. Prompts of different lengths are padded on
the right, where no token of theirs looks; the tokens that follow are written over the padding.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention import fused_attention
from model.config import LMConfig


class LayerCache:
    """The keys and values of one block, (B, n_kv_heads, capacity, head_dim) each."""

    def __init__(self, cache: "Cache", keys: Tensor, values: Tensor):
        self.cache, self.keys, self.values = cache, keys, values

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, and attend to everything that is stored.

        Args:
            q: (B, T, H, head_dim). T is 1, or the length of the prompts of an empty cache.
            k, v: (B, T, n_kv_heads, head_dim).

        Returns:
            (B, T, H, head_dim).
        """
        cache, keys, values = self.cache, self.keys, self.values
        if cache.longest == 0:
            keys[:, :, : k.shape[1]] = k.transpose(1, 2)
            values[:, :, : k.shape[1]] = v.transpose(1, 2)
            return fused_attention(q, k, v, 0.0)
        if cache.mask is None:
            keys[:, :, cache.longest], values[:, :, cache.longest] = k[:, 0], v[:, 0]
        else:
            keys[cache.rows, :, cache.columns] = k[:, 0]
            values[cache.rows, :, cache.columns] = v[:, 0]
        # The query heads that share a key/value head are the rows of one matrix.
        grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])
        seen = slice(cache.longest + 1)
        keys, values = keys[:, :, seen], values[:, :, seen]
        return F.scaled_dot_product_attention(grouped, keys, values, cache.mask).view(q.shape)


class Cache:
    """The cache of a whole model, and the length of each sequence in it.

    Args:
        lengths: tokens of each prompt that is to be read first.
        capacity: positions of each sequence, prompt included.
    """

    def __init__(
        self,
        config: LMConfig,
        lengths: list[int],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (len(lengths), config.n_kv_heads, capacity, config.head_dim)
        self.layers = [
            LayerCache(self, *(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
            for _ in range(config.n_layers)
        ]
        self.device = device
        self.longest = 0  # tokens of the longest sequence that are stored
        self.mask: Tensor | None = None  # (B, 1, 1, columns), true where the next token looks
        self.lengths = lengths
        self.rows = torch.arange(len(lengths), device=device)
        self.columns = torch.tensor(lengths, device=device)  # where the next tokens go

    def set_lengths(self, lengths: list[int]) -> None:
        """Set how many tokens of each sequence are stored."""
        self.lengths, self.longest = lengths, max(lengths, default=0)
        self.rows = torch.arange(len(lengths), device=self.device)
        self.columns = torch.tensor(lengths, device=self.device)
        self._set_mask()

    def _set_mask(self) -> None:
        self.mask = None
        if len(set(self.lengths)) > 1:
            columns = torch.arange(self.longest + 1, device=self.device)
            self.mask = (columns <= self.columns[:, None])[:, None, None]

    def rotations(self, pos_cis: Tensor, seq_len: int) -> Tensor:
        """Return the rows of pos_cis for the next tokens: (seq_len, head_dim/2) for prompts, then
        (B, 1, head_dim/2)."""
        return pos_cis[:seq_len] if self.longest == 0 else pos_cis[self.columns][:, None]

    def take(self, x: Tensor) -> Tensor:
        """Count the tokens that were read as stored; return what x, (B, T, dim), has of the last
        token of each sequence, (B, dim)."""
        if self.longest == 0:
            self.longest = max(self.lengths)
            last = x[self.rows, self.columns - 1]
        else:
            self.lengths = [length + 1 for length in self.lengths]
            self.longest += 1
            self.columns += 1
            last = x[:, 0]
        self._set_mask()
        return last

    @property
    def room(self) -> int:
        """Positions of a sequence."""
        return self.layers[0].keys.shape[2]

    def make_room(self, capacity: int) -> None:
        """Extend every sequence to `capacity` positions, if it has fewer."""
        more = (0, 0, 0, capacity - self.room)
        for layer in self.layers if capacity > self.room else ():
            layer.keys, layer.values = F.pad(layer.keys, more), F.pad(layer.values, more)

    def keep(self, rows: list[int]) -> None:
        """Go on with these sequences only, in this order."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self.set_lengths([self.lengths[row] for row in rows])

    def append(self, other: "Cache") -> None:
        """Add the sequences of another cache of the same capacity as the last rows."""
        for mine, new in zip(self.layers, other.layers, strict=True):
            mine.keys = torch.cat([mine.keys, new.keys])
            mine.values = torch.cat([mine.values, new.values])
        self.set_lengths(self.lengths + other.lengths)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Leave cuDNN's attention out in here, where lengths change from call to call.

    On compute capability 9 and 10 (H100, H200, B200) PyTorch prefers cuDNN's attention in 16 bits,
    which makes a plan for every new shape: one for each token of a cache that grows. (`sdpa_kernel`
    can do this too, and takes several times as long, at every token.)
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
