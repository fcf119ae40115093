"""An experiment: wq, wk and wv as one product, and w1 and w3 as one.

On a CPU that gave nothing (docs/lab-log.md). On a GPU the small wk and wv leave most
multiprocessors idle. `benchmarks.throughput --contenders ours-compiled,ours-compiled+fused` tells.
"""

from contextlib import AbstractContextManager
from unittest.mock import patch

from torch import Tensor, nn
from torch.nn import functional as F

from model import transformer
from model.attention import Attention
from model.config import LMConfig
from model.feed_forward import FeedForward
from model.rotary import apply_rotary_emb


class FusedAttention(Attention):
    """`Attention` with the rows of wq, wk and wv under each other in one matrix."""

    def __init__(self, config: LMConfig):
        super().__init__(config)
        self.heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        del self.wq, self.wk, self.wv
        self.wqkv = nn.Linear(config.dim, sum(self.heads) * config.head_dim, bias=False)

    def forward(self, x: Tensor, pos_cis: Tensor) -> Tensor:
        qkv = self.wqkv(x).unflatten(-1, (sum(self.heads), self.head_dim))
        q, k, v = qkv.split(self.heads, dim=2)  # (B, T, heads, head_dim)
        q, k = apply_rotary_emb(q, k, pos_cis)
        out = self.attend(q, k, v, self.dropout if self.training else 0.0)
        return self.residual_dropout(self.wo(out.flatten(2)))


class FusedFeedForward(FeedForward):
    """`FeedForward` with the rows of w1 and w3 under each other in one matrix."""

    def __init__(self, config: LMConfig):
        super().__init__(config)
        del self.w1, self.w3
        self.w13 = nn.Linear(config.dim, 2 * config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w13(x).chunk(2, dim=-1)
        return self.dropout(self.w2(F.silu(gate) * value))


def fused_projections() -> AbstractContextManager:
    """Within it, a `Transformer` is made of these."""
    return patch.multiple(transformer, Attention=FusedAttention, FeedForward=FusedFeedForward)
