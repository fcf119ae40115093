"""The whole model, a Llama-style decoder: embedding, blocks, norm, output layer, loss.

Pre-norm blocks with RMSNorm, rotary positions, grouped-query attention and SwiGLU, no biases, input
embedding and output layer tied by default.
"""

from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import Attention
from model.cache import Cache, LayerCache
from model.config import LMConfig
from model.loss import IGNORE_INDEX, TokenLoss, tokens_at_once
from model.recompute import recomputed
from model.rotary import precompute_pos_cis


class TransformerOutput(NamedTuple):
    logits: Tensor | None  # (B, T, vocab_size); None when a loss was asked for
    loss: Tensor | None  # fp32; None when no targets were given
    hits: Tensor | None = None  # (B, T), whether the target was the likeliest, where asked for


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in fp32 and returned in
    the dtype of x. Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467."""

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).type_as(x)


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


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): (B, T, dim) → (B, T, dim)."""

    recompute = "off"  # see model/recompute.py

    def __init__(self, config: LMConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, pos_cis: Tensor, cache: LayerCache | None = None) -> Tensor:
        return recomputed(self._forward, self.recompute, x, pos_cis, cache)

    def _forward(self, x: Tensor, pos_cis: Tensor, cache: LayerCache | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), pos_cis, cache)
        return x + self.feed_forward(self.ffn_norm(x))


def flops_per_token(config: LMConfig) -> float:
    """`Transformer.flops_per_token` at max_seq_len, of a model that need not be there."""
    with torch.device("meta"):  # shapes without memory
        return Transformer(config).flops_per_token(config.max_seq_len)


class Transformer(nn.Module):
    """Tokens in, logits or loss out. Parameter names are those of Llama's own release.

    The model knows nothing of how it is trained, with three exceptions: it computes nothing on the
    meta device, `forward` follows autocast, and LoRA records its settings in `lora`.
    """

    lora = None  # of a model with adapters, see model/lora.py

    def __init__(self, config: LMConfig | None = None):
        super().__init__()
        self.config = config = config or LMConfig()
        # Random numbers on the meta device take torch's compiler, and seconds to load it.
        on_meta = torch.get_default_device().type == "meta"
        weight = torch.empty(config.vocab_size, config.dim) if on_meta else None
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, _weight=weight)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.token_loss = TokenLoss()
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("pos_cis", self._pos_cis(), persistent=False)
        for block in self.layers:  # the two layers of a block that write into the residual stream
            block.attention.wo.writes_residual = block.feed_forward.w2.writes_residual = True
        self.apply(self._init_weights)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        cache: Cache | None = None,
    ) -> TransformerOutput:
        """Compute the logits of every position, or the loss against targets.

        Args:
            tokens: (B, T) int64, T at most max_seq_len.
            targets: (B, T) int64, the token after each position; IGNORE_INDEX leaves one out.
            reduction: "mean" over the targets that count, "none" for the loss of each position, or
                "hits" for that and whether its target was the likeliest.
            cache: holds the tokens before these, and takes these up. The logits are then those of
                the last token of each sequence, (B, vocab_size).

        Returns:
            Logits of shape (B, T, vocab_size), or with targets the cross-entropy in nats, in fp32.

        Raises ValueError: the sequence is longer than max_seq_len.
        """
        seq_len = tokens.shape[1]
        if seq_len > self.config.max_seq_len:
            most = self.config.max_seq_len
            raise ValueError(f"sequence of {seq_len} tokens, but max_seq_len is {most}")
        x = self.tok_embeddings(tokens)  # (B, T, dim)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        if torch.is_autocast_enabled(x.device.type):
            # The residual stream in 16 bits, as it is under DeepSpeed: half the memory traffic.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        pos_cis = cache.begin(self.pos_cis, seq_len) if cache else self.pos_cis[:seq_len]
        caches = cache.layers if cache else repeat(None)
        for layer, own in zip(self.layers, caches, strict=False):
            x = layer(x, pos_cis, own)
        if cache:
            x = cache.end(x)  # (B, dim)
        x = self.norm(x)
        if targets is None:
            return TransformerOutput(self.output(x), None)
        return self._loss(x, targets, reduction)

    def _loss(self, x: Tensor, targets: Tensor, reduction: str) -> TransformerOutput:
        """From (B, T, dim) before the output layer, `tokens_at_once` at a time."""
        size = tokens_at_once(self.config.vocab_size, targets.numel())
        whole = size == targets.numel()
        if whole and reduction == "mean":
            return TransformerOutput(None, self.token_loss(self.output(x), targets, reduction))

        def score(x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            logits = self.output(x)  # (tokens, vocab_size)
            loss = self.token_loss(logits[None], targets[None], "none")[0]
            return (loss, logits.argmax(dim=-1) == targets) if reduction == "hits" else (loss,)

        chunks = zip(x.flatten(0, 1).split(size), targets.flatten().split(size), strict=True)
        scored = [recomputed(score, "off" if whole else "blocks", *chunk) for chunk in chunks]
        loss, *hits = (torch.cat(each).view_as(targets) for each in zip(*scored, strict=True))
        if reduction == "mean":
            loss = loss.sum() / (targets != IGNORE_INDEX).sum()
        return TransformerOutput(None, loss, *hits)

    def num_parameters(self) -> int:
        """All parameters, a tied matrix counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: float) -> float:
        """Return the model FLOPs of forward and backward for one token of a sequence of seq_len.

        6·N, or 4·N for frozen weights, and 12·n_layers·n_heads·head_dim·seq_len for attention, not
        halved for causality (PaLM, appendix B, https://arxiv.org/abs/2204.02311). N leaves out an
        input embedding that is not the output layer too.
        """
        config = self.config
        counted = {id(p): p for p in self.parameters()}
        if not config.tie_embeddings:
            del counted[id(self.tok_embeddings.weight)]
        products = sum((6 if p.requires_grad else 4) * p.numel() for p in counted.values())
        return products + 12 * config.n_layers * config.n_heads * config.head_dim * seq_len

    def _init_weights(self, module: nn.Module) -> None:
        """Draw normal weights of deviation 0.02, as in GPT-2 scaled by 1/sqrt(2·n_layers) in layers
        that write into the residual stream: 2·n_layers such writes add up.

        Called through `apply`, which gathers the parameters first under `deepspeed.zero.Init`;
        there they may be 16 bits and on a GPU, with other random numbers.
        """
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
            std = 0.02
            if getattr(module, "writes_residual", False):
                std /= (2 * self.config.n_layers) ** 0.5
            drawn = torch.empty(module.weight.shape).normal_(mean=0.0, std=std)
            module.weight.data.copy_(drawn)

    def _pos_cis(self) -> Tensor:
        config = self.config
        if self.norm.weight.is_meta:  # computing it there takes torch's compiler too
            shape = config.max_seq_len, config.head_dim // 2
            return torch.empty(shape, dtype=torch.complex64, device="meta")
        return precompute_pos_cis(
            config.head_dim, config.max_seq_len, config.rope_theta, config.rope_scaling
        )

    def _apply(self, fn, recurse=True):
        """Move or cast the module. pos_cis is moved but never cast: a real dtype has no imaginary
        part."""
        pos_cis = self._buffers.pop("pos_cis")
        super()._apply(fn, recurse)
        device = fn(torch.zeros(0, device=pos_cis.device)).device
        if pos_cis.is_meta and device.type != "meta":  # to_empty(): there is nothing to copy from
            pos_cis = self._pos_cis()
        self.register_buffer("pos_cis", pos_cis.to(device), persistent=False)
        return self
