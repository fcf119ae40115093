"""Mixture of experts: a router chooses a few of several feed-forward networks for each token.

The tokens are sorted by expert. Grouped products then multiply each expert's tokens by the expert's
own matrices, and no token is left out. The matrices of all experts are stacked into three
parameters, so every parameter always has a gradient: zeros for an expert that got no token.

By default the router's probabilities are not divided by their sum over the chosen experts. With one
expert per token the quotient would be 1, and the cross-entropy would not train the router.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import LMConfig

ROUTING = ("balancing_loss", "busiest_expert", "idlest_expert")  # names in the log


class Experts(nn.Module):
    """E routed experts, of which each token uses K, and S shared experts, which every token uses.

    Each expert is a SwiGLU network of width moe_hidden_dim. The output is the sum of the outputs of
    the token's experts; the output of a routed expert is multiplied by its weight (`choose`). All
    matrices are direct parameters, so that ZeRO-3 gathers them together.
    Source: Fedus et al., Switch Transformers, https://arxiv.org/abs/2101.03961."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.n_routed, self.n_shared = config.n_routed_experts, config.n_shared_experts
        self.n_chosen = config.num_experts_per_tok
        self.normalizes = config.norm_topk_prob
        self.dropout = config.dropout
        count, hidden_dim = self.n_routed + self.n_shared, config.moe_hidden_dim
        self.router = nn.Parameter(torch.empty(self.n_routed, config.dim))
        # In w1, w2 and w3, the shared experts are the last ones.
        self.w1 = nn.Parameter(torch.empty(count, hidden_dim, config.dim))  # gate
        self.w2 = nn.Parameter(torch.empty(count, config.dim, hidden_dim))  # output
        self.w3 = nn.Parameter(torch.empty(count, hidden_dim, config.dim))  # value

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, (B, T, dim), and the router's probabilities, fp32 (B, T, E)."""
        probabilities = self.route(x)
        weights, chosen = self.choose(probabilities)  # (B, T, K + S) each
        order = chosen.flatten().argsort(stable=True)  # sorts the tokens' copies by expert
        n_copies = chosen.shape[-1]
        # Copies, because with repeated indices into x, a GPU would sum gradients in varying order.
        copies = x.unsqueeze(2).expand(-1, -1, n_copies, -1).flatten(0, 2)
        rows = copies.index_select(0, order)  # (B · T · (K + S), dim)
        experts = torch.arange(len(self.w1), device=x.device)
        ends = torch.searchsorted(
            chosen.flatten()[order], experts, right=True, out_int32=True
        )  # the index after the last row of each expert
        gate, value = (grouped_product(rows, w.type_as(x), ends) for w in (self.w1, self.w3))
        out = grouped_product(F.silu(gate) * value, self.w2.type_as(x), ends)
        out = out.index_select(0, order.argsort()).view(*chosen.shape, -1)  # (B, T, K + S, dim)
        out = (out * weights.unsqueeze(-1)).sum(dim=2).type_as(x)
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        return out, probabilities

    def route(self, x: Tensor) -> Tensor:
        """Return the probability of each routed expert, computed in fp32, (B, T, E)."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.router.float()).softmax(dim=-1)

    def choose(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of each token's experts, (B, T, K + S) each."""
        weights, chosen = probabilities.topk(self.n_chosen)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        shared = torch.arange(self.n_shared, device=chosen.device) + self.n_routed
        shared = shared.expand(*chosen.shape[:2], -1)
        ones = torch.ones_like(shared, dtype=weights.dtype)
        return torch.cat([weights, ones], dim=-1), torch.cat([chosen, shared], dim=-1)


def load_balance(routing: Tensor, counts: Tensor, n_chosen: int) -> dict[str, Tensor]:
    """Return the values of ROUTING for a micro-batch; see docs/architecture.md.

    The balancing loss of a sequence and layer is E · Σ share · probability over the E experts.
    `share` is the expert's share of the sequence's choices, `probability` its mean probability.
    The loss is 1 if the load is even. It does not depend on how micro-batches divide a batch.

    Args:
        routing: the router's probabilities in each layer, (n_layers, B, T, E).
        counts: bool (B, T), True for the tokens that count in the loss."""
    n_layers, *_, n_experts = routing.shape
    counted = counts[..., None].to(routing.dtype)
    chosen = torch.zeros_like(routing).scatter_(-1, routing.topk(n_chosen).indices, 1.0)
    choices, sums = ((x * counted).sum(dim=2) for x in (chosen, routing))  # (n_layers, B, E)
    n_tokens = counts.sum(dim=1)[:, None]  # (B, 1)
    total = n_tokens.sum().clamp(min=1)
    loss = (choices * sums / n_tokens.clamp(min=1)).sum() * n_experts / n_chosen
    loss = loss / (n_layers * total)  # the mean over layers and tokens
    load = choices.sum(dim=1) / (n_chosen * total)  # (n_layers, E), shares of the choices
    return dict(zip(ROUTING, (loss, load.max(), load.min()), strict=True))


@torch.library.custom_op("small_lm::grouped_mm", mutates_args=())
def grouped_product(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Return the products x yᵀ of G groups; `ends` has the index after each group, int32 (G,).

    The rows of x, (R, in), are grouped, and y is (G, out, in), a matrix for each group; or the
    columns of x and y, (n, R) and (m, R), are grouped. This is a custom operation, because PyTorch
    cannot compile the grouped product in fp32."""
    return F.grouped_mm(x, y.mT, offs=ends)


@grouped_product.register_fake
def _(x, y, ends):
    groups = ends.shape if y.dim() == 2 else ()
    return x.new_empty(*groups, x.shape[0], y.shape[-2])


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    rows, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return grouped_product(grad, weight.mT, ends), grouped_product(grad.t(), rows.t(), ends), None


grouped_product.register_autograd(_backward, setup_context=_save_for_backward)
