"""Key/value cache: keep the keys and values of past tokens, so that each token is computed once.

The first pass of the model reads the prompts. Each later pass reads one new token per sequence.
Prompts that are shorter than the longest are padded on the right; new tokens overwrite the padding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention import fused_attention
from model.config import LMConfig

# A new cache has few positions, a multiple of STRETCH: max_seq_len of them may take gigabytes.
STRETCH = 64  # a multiple of 16: a GPU would copy a mask of another length


class Cache:
    """The cache of all blocks. A full cache doubles, up to max_seq_len positions. `lengths` counts
    each prompt's tokens. If `fixed`, later passes have equal shapes, as a CUDA graph needs."""

    def __init__(
        self,
        config: LMConfig,
        lengths: list[int],
        dtype: torch.dtype,
        device: torch.device,
        fixed: bool,
    ):
        self.device, self.context, self.fixed = device, config.max_seq_len, fixed
        self.allocated = min((max(lengths) // STRETCH + 2) * STRETCH, self.context)  # positions
        shape = (2, len(lengths), config.n_kv_heads, self.allocated, config.head_dim)
        blocks = range(config.n_layers)
        # Keys and values of each block, (B, n_kv_heads, allocated positions, head_dim) each.
        self.stored = [[*torch.zeros(shape, dtype=dtype, device=device)] for _ in blocks]
        self.reads_prompts = True  # until the first `advance`
        self._set_lengths(lengths)

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths  # tokens of each sequence, including those of the next pass
        self.longest = max(lengths)
        self.rows = torch.arange(len(lengths), device=self.device)[:, None]  # (B, 1)
        # Position of each sequence's last token, (B, 1). Passes without a mask do not update it.
        self.columns = torch.tensor(lengths, device=self.device)[:, None] - 1
        self.steps = 0  # later passes with tensors of these shapes
        self.replay: Callable[[Tensor], Tensor] | None = None  # runs the CUDA graph

    def advance(self) -> None:
        """Make room for a token per sequence, before each later pass; none may fill the context.
        A CUDA graph holds the pass, but not this part of a step."""
        if self.longest == self.allocated:
            self._allocate(min(2 * self.allocated, self.context))
            self._set_lengths(self.lengths)  # drop the CUDA graph: it uses the old addresses
        self.reads_prompts = False
        self.lengths = [length + 1 for length in self.lengths]
        self.longest += 1
        self.steps += 1

    def begin(self, pos_cis: Tensor) -> tuple[Tensor, list[Callable]]:
        """Begin a pass. Return the rotations of the new tokens, (T, head_dim/2) or
        (B, 1, head_dim/2), and for each block a function that computes attention."""
        width = self.allocated if self.fixed else self.longest  # positions that a later pass reads
        rows, mask = slice(None), None  # all sequences use the same columns
        if self.reads_prompts:
            columns = slice(self.longest)
        elif not self.fixed and min(self.lengths) == self.longest:
            columns = slice(self.longest - 1, self.longest)
        else:  # each sequence has its own column
            self.columns += 1  # in place, because a CUDA graph reads this address
            rows, columns = self.rows, self.columns
            mask = (torch.arange(width, device=self.device) <= columns)[:, None, None]

        def attend(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Let the new tokens, q, k and v, (B, T, heads, head_dim), attend to themselves and the
            past, and store them in `keys` and `values`. The result has the shape of q."""
            keys.transpose(1, 2)[rows, columns] = k
            values.transpose(1, 2)[rows, columns] = v
            if self.reads_prompts:
                return fused_attention(q, k, v, 0.0)
            keys, values = (x.narrow(2, 0, width) for x in (keys, values))
            # Group the query heads that share a key/value head: (B, n_kv_heads, group, head_dim).
            grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])
            out = F.scaled_dot_product_attention(grouped, keys, values, mask)
            return out.reshape(q.shape)  # on a GPU `out` may have other strides than q

        return pos_cis[columns], [partial(attend, *stored) for stored in self.stored]

    def last(self, x: Tensor) -> Tensor:
        """Return x of the last token of each sequence: (B, T, dim) → (B, dim)."""
        return (x[self.rows, self.columns] if self.reads_prompts else x)[:, 0]

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Keep only the sequences with these indices, in this order."""
        index = torch.tensor(rows, device=self.device)  # one copy to a GPU, not two per layer
        for i, stored in enumerate(self.stored):
            self.stored[i] = [x[index] for x in stored]
        self._set_lengths([self.lengths[row] for row in rows])

    @torch.inference_mode()
    def append(self, other: "Cache") -> None:
        """Append the sequences of another cache as the last rows."""
        for cache in (self, other):
            cache._allocate(max(self.allocated, other.allocated))
        for i, new in enumerate(other.stored):
            self.stored[i] = [torch.cat(pair) for pair in zip(self.stored[i], new, strict=True)]
        self._set_lengths(self.lengths + other.lengths)

    def _allocate(self, positions: int) -> None:
        padding = (0, 0, 0, positions - self.allocated)  # after the last position
        for i, stored in enumerate(self.stored):
            self.stored[i] = [F.pad(x, padding) for x in stored]
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
