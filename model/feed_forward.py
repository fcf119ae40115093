"""The feed-forward half of a block: SwiGLU."""

from torch import Tensor, nn
from torch.nn import functional as F

from model.config import LMConfig


class FeedForward(nn.Module):
    """w2(silu(w1 x) · w3 x), dim → hidden_dim → dim. Source: Shazeer, https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)  # gate
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)  # to the residual stream
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)  # value
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.project(x)  # (B, T, hidden_dim) each
        out = self.w2(F.silu(gate) * value)
        return F.dropout(out, self.dropout, self.training) if self.dropout else out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and value before they are multiplied."""
        return self.w1(x), self.w3(x)
