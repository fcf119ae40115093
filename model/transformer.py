"""The whole model, a Llama-style decoder: embedding, blocks, norm, output layer, loss.

It has pre-norm blocks with RMSNorm, rotary positions, grouped-query attention and SwiGLU. No layer
has a bias. The input embedding and the output layer share one matrix by default.
"""

from collections.abc import Callable
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import Attention, mask_of
from model.cache import Cache
from model.config import LMConfig
from model.experts import Experts
from model.loss import NextTokenLoss
from model.norm import RMSNorm
from model.recompute import recomputed
from model.rotary import precompute_pos_cis


class TransformerOutput(NamedTuple):
    logits: Tensor | None  # (B, T, vocab_size), with a cache (B, vocab_size); None with targets
    loss: Tensor | None  # in nats, fp32; None if no targets were given
    # (B, T), True where the target was the likeliest token; None with the reduction "mean"
    hits: Tensor | None = None
    # fp32 (n_layers, B, T, E), probabilities of the routed experts; None without experts
    routing: Tensor | None = None


class FeedForward(nn.Module):
    """SwiGLU, w2(silu(w1 x) · w3 x). Source: Shazeer, https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)  # gate
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)  # output
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)  # value
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.project(x)
        out = self.w2(F.silu(gate) * value)  # (B, T, dim)
        return F.dropout(out, self.dropout, self.training) if self.dropout else out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and value, the two projections of x: (B, T, hidden_dim) each."""
        return self.w1(x), self.w3(x)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): (B, T, dim) → (B, T, dim)."""

    recompute = "off"  # gradient checkpointing, see model/recompute.py

    def __init__(self, config: LMConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.has_experts = config.use_moe
        self.feed_forward = Experts(config) if config.use_moe else FeedForward(config)

    def forward(
        self,
        x: Tensor,
        pos_cis: Tensor,
        attend: Callable | None = None,
        mask: Tensor | None = None,
    ):
        """Return the new x; with experts, also the router's probabilities, (B, T, E)."""
        return recomputed(self._forward, self.recompute, x, pos_cis, attend, mask)

    def _forward(self, x: Tensor, pos_cis: Tensor, attend: Callable | None, mask: Tensor | None):
        x = x + self.attention(self.attention_norm(x), pos_cis, attend, mask)
        if not self.has_experts:
            return x + self.feed_forward(self.ffn_norm(x))
        out, probabilities = self.feed_forward(self.ffn_norm(x))
        return x + out, probabilities


class Transformer(nn.Module):
    """The decoder. It takes tokens and returns logits or a loss.
    Its parameters have the names of Llama's own release. To learn the model, skip the
    meta device, autocast, `recompute`, `lora`, `flops_per_token` and zero.Init, which are for
    training or loading, and `cache`, which is for generation."""

    lora = None  # settings of the adapters, if the model has any; see model/lora.py

    def __init__(self, config: LMConfig | None = None):
        super().__init__()
        self.config = config = config or LMConfig()
        # normal_() on the meta device would load torch's compiler, which takes seconds.
        on_meta = torch.get_default_device().type == "meta"
        weight = torch.empty(config.vocab_size, config.dim) if on_meta else None
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, _weight=weight)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.next_token_loss = NextTokenLoss()
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        # pos_cis is not saved, because the configuration determines it.
        self.register_buffer("pos_cis", self._pos_cis(), persistent=False)
        for block in self.layers:
            block.attention.wo.weight.writes_residual = True
            w2 = block.feed_forward.w2
            (w2 if config.use_moe else w2.weight).writes_residual = True
        self.apply(self._init_weights)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        cache: Cache | None = None,
        starts: Tensor | None = None,
    ) -> TransformerOutput:
        """Compute the logits of every position or, if targets are given, the loss.

        Args:
            tokens: (B, T) int64, T at most max_seq_len.
            targets: (B, T) int64, the next token of each position; IGNORE_INDEX does not count.
            reduction: "mean" over the targets that count, or "none" for the loss and the `hits` of
                each position.
            cache: for generation; it holds the keys and values of the past and stores new ones.
                Only the last token of each sequence then has logits, (B, vocab_size).
            starts: (B, T) int64, the first position that each position sees (default: 0).

        Raises ValueError if the sequence is longer than max_seq_len."""
        x = self.tok_embeddings(tokens)  # (B, T, dim)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        if torch.is_autocast_enabled(x.device.type):
            # Keep the residual stream in 16 bits, as DeepSpeed does, to halve the memory traffic.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        pos_cis, cached = self.pos_cis[: tokens.shape[1]], repeat(None)
        if cache:
            pos_cis, cached = cache.begin(self.pos_cis)
        mask = None if starts is None else mask_of(starts, x.dtype)
        routing = []
        for layer, attend in zip(self.layers, cached, strict=False):
            x = layer(x, pos_cis, attend, mask)
            if self.config.use_moe:
                x, probabilities = x
                routing.append(probabilities)
        if cache:
            x = cache.last(x)  # (B, dim)
        x = self.norm(x)
        logits = loss = hits = None
        if targets is None:
            logits = self.output(x)
        else:
            loss, hits = self.next_token_loss(self.output, x, targets, reduction)
        return TransformerOutput(logits, loss, hits, torch.stack(routing) if routing else None)

    def num_parameters(self, active: bool = False) -> int:
        """Return the number of parameters. A tied matrix counts once. With `active`, the
        count leaves out the experts that a token does not use."""
        return sum(self._active(p) if active else p.numel() for p in self.parameters())

    def _active(self, p: nn.Parameter) -> int:
        """Return the number of elements of a parameter; of experts, only what one token uses."""
        config = self.config
        if p.dim() < 3:
            return p.numel()
        return p[0].numel() * (config.num_experts_per_tok + config.n_shared_experts)

    def flops_per_token(self, seq_len: float) -> float:
        """Return the model FLOPs per token of forward and backward for sequences of seq_len tokens.

        A trained parameter costs 6, a frozen one 4. Experts that the token does not use cost 0.
        Attention adds 12·n_layers·n_heads·head_dim·seq_len, as if every position saw all others.
        An untied input embedding is a lookup and does not count. Source: PaLM, appendix B,
        https://arxiv.org/abs/2204.02311."""
        config = self.config
        counted = {id(p): p for p in self.parameters()}
        if not config.tie_embeddings:
            del counted[id(self.tok_embeddings.weight)]
        products = sum((6 if p.requires_grad else 4) * self._active(p) for p in counted.values())
        return products + 12 * config.n_layers * config.n_heads * config.head_dim * seq_len

    def _init_weights(self, module: nn.Module) -> None:
        """Draw a layer's weights from a normal distribution with standard deviation 0.02.

        Layers that write into the residual stream use 0.02 / sqrt(2·n_layers), as in GPT-2,
        because their 2·n_layers outputs are added up. Under `deepspeed.zero.Init`, `apply`
        gathers the whole weight before this call."""
        if not isinstance(module, nn.Linear | nn.Embedding | Experts):
            return
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta:
                continue
            std = 0.02
            if getattr(parameter, "writes_residual", False):
                std /= (2 * self.config.n_layers) ** 0.5
            # Under DeepSpeed's zero.Init, torch.empty returns a 16-bit tensor on the GPU, so a seed
            # would give other weights. Training prevents this: see deepspeed_setup.py.
            drawn = torch.empty(parameter.shape).normal_(mean=0.0, std=std)
            parameter.data.copy_(drawn)

    def _pos_cis(self) -> Tensor:
        config = self.config
        if self.norm.weight.is_meta:  # computing the table would load torch's compiler
            shape = config.max_seq_len, config.head_dim // 2
            return torch.empty(shape, dtype=torch.complex64, device="meta")
        return precompute_pos_cis(
            config.head_dim, config.max_seq_len, config.rope_theta, config.rope_scaling
        )

    def _apply(self, fn, recurse=True):
        """Move or cast the module. `pos_cis` is moved but never cast, so it stays complex."""
        pos_cis = self._buffers.pop("pos_cis")
        super()._apply(fn, recurse)
        device = fn(torch.zeros(0, device=pos_cis.device)).device
        if pos_cis.is_meta and device.type != "meta":  # to_empty() moved the model away from meta
            pos_cis = self._pos_cis()
        self.register_buffer("pos_cis", pos_cis.to(device), persistent=False)
        return self
