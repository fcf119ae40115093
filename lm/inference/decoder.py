"""Decoding: compute the logits of the next token, first for whole prompts, then token by token.

`prepare_for_generation` makes a copy of a `Transformer` that is faster for single tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.inference.prompts import say
from model import Attention, Transformer
from model.cache import Cache, without_cudnn
from model.lora import weight_of


def packed(*layers: nn.Linear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that computes x Wᵀ, where W stacks the weights of layers with the same
    input.

    On a CPU with oneDNN, a bf16 W or a large fp32 W is reordered once into blocks. If x has few
    rows, the product is then about twice as fast (docs/lab-log.md). For a small fp32 W, `F.linear`
    is faster, because each call of oneDNN costs 10 µs."""
    weight = torch.cat([weight_of(layer).detach() for layer in layers]).to(dtype)
    if not _onednn_is_faster(weight):
        return lambda x: F.linear(x, weight)
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, blocks, None, "none", [], "")


def _onednn_is_faster(weight: Tensor) -> bool:
    """Return True if oneDNN multiplies by this weight faster than `F.linear`."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and weight.numel() >= 1 << 18


def project_heads(attention: Attention, dtype: torch.dtype) -> Callable:
    """Return a replacement for `attention.project` with one matrix product for q, k and v. The
    rotation is a complex product: without torch.compile, real arithmetic would be slower."""
    product = packed(attention.wq, attention.wk, attention.wv, dtype=dtype)
    n_heads, n_kv_heads = attention.n_heads, attention.n_kv_heads
    shape = (n_heads + 2 * n_kv_heads, attention.head_dim)
    norms = None  # the weights of the norms of queries and keys, (heads, head_dim)
    if attention.q_norm is not None:
        eps, q_norm, k_norm = attention.q_norm.eps, attention.q_norm.weight, attention.k_norm.weight
        norms = torch.stack([q_norm] * n_heads + [k_norm] * n_kv_heads).detach().float()

    def project(x: Tensor, pos_cis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = product(x).view(*x.shape[:2], *shape)  # (B, T, all heads, head_dim)
        qk, v = qkv.split_with_sizes((n_heads + n_kv_heads, n_kv_heads), dim=2)
        qk = qk.float()
        if norms is not None:
            qk = torch.rms_norm(qk, qk.shape[-1:], eps=eps) * norms
        pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2)))  # (B, T, H, head_dim/2)
        qk = torch.view_as_real(pairs * pos_cis.unsqueeze(-2)).flatten(-2).type_as(x)
        return *qk.split_with_sizes((n_heads, n_kv_heads), dim=2), v

    return project


def prepare_for_generation(model: Transformer, dtype: torch.dtype) -> Transformer:
    """Return a copy of the model for generation, with weights in `dtype` and adapters merged. If
    the model has this dtype, the copy shares the model's norms, embedding and experts."""

    def fused(norm: nn.Module) -> Callable:
        weight = norm.weight.detach().to(dtype)
        return partial(torch.rms_norm, normalized_shape=weight.shape, weight=weight, eps=norm.eps)

    with torch.device("meta"):
        prepared = Transformer(model.config).eval()
    for block, original in zip(prepared.layers, model.layers, strict=True):
        attention, feed_forward = block.attention, block.feed_forward
        attention.project = project_heads(original.attention, dtype)
        _replace(attention, wo=packed(original.attention.wo, dtype=dtype))
        if model.config.use_moe:
            weights = original.feed_forward.named_parameters()
            _replace(feed_forward, **{name: p.detach().to(dtype) for name, p in weights})
        else:
            gate_and_value = packed(original.feed_forward.w1, original.feed_forward.w3, dtype=dtype)
            feed_forward.project = lambda x, product=gate_and_value: product(x).chunk(2, dim=-1)
            _replace(feed_forward, w2=packed(original.feed_forward.w2, dtype=dtype))
        _replace(
            block,
            attention_norm=fused(original.attention_norm),
            attention=attention.forward,
            ffn_norm=fused(original.ffn_norm),
            feed_forward=feed_forward.forward,
        )
    embedding = model.tok_embeddings.weight.detach().to(dtype)
    _replace(
        prepared,
        tok_embeddings=partial(F.embedding, weight=embedding),
        pos_cis=model.pos_cis,
        layers=[block._forward for block in prepared.layers],
        norm=fused(model.norm),
        output=packed(model.output, dtype=dtype),
    )
    return prepared


def _replace(module: nn.Module, **others) -> None:
    """Replace parts by functions or tensors: module calls take a tenth of a small model's time."""
    for name, other in others.items():
        delattr(module, name)
        setattr(module, name, other)


def record(run: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """Record the kernels of `run` in a CUDA graph, without running them. Return a function that
    launches them all at once for new tokens. Each call overwrites and returns the same tensor."""
    graph, tokens = torch.cuda.CUDAGraph(), tokens.clone()
    # The first context selects the GPU of `tokens`, and restores the stream after an error.
    stream = torch.cuda.stream(torch.cuda.current_stream(tokens.device))
    with stream, torch.cuda.graph(graph, capture_error_mode="thread_local"):  # others may use CUDA
        logits = run(tokens)

    def replay(new: Tensor) -> Tensor:
        tokens.copy_(new)
        graph.replay()
        return logits

    return replay


class Decoder:
    """Compute the logits of the next token, for prompts and then token by token.

    Args:
        model: if its weights change, make a new decoder, because a decoder copies weights.
        dtype: dtype of weights and cache; None keeps the model's. Logits are always fp32.
        divided: True if ZeRO-3 divides the model; all processes must then make the same calls."""

    def __init__(self, model: Transformer, dtype: torch.dtype | None = None, divided: bool = False):
        self.config, self.divided = model.config, divided
        self.dtype = dtype or model.tok_embeddings.weight.dtype
        self.device = model.tok_embeddings.weight.device
        self.forward = model if divided else prepare_for_generation(model, self.dtype).forward
        # Kernel launches take most of a step. Experts are not recorded: in them the CPU may wait.
        self.recorded = self.device.type == "cuda" and not (divided or model.config.use_moe)

    @torch.inference_mode()
    def read(self, prompts: list[list[int]]) -> tuple[Cache, Tensor]:
        """Read prompts of 1 to max_seq_len token ids. Return their cache and the fp32 logits of
        each prompt's next token, (B, vocab_size)."""
        lengths = [len(prompt) for prompt in prompts]
        cache = Cache(self.config, lengths, self.dtype, self.device, fixed=self.recorded)
        rows = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]
        return cache, self._logits(torch.tensor(rows, device=self.device), cache)

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Append `tokens`, int64 (B, 1), to the cache, in which no sequence may fill the context.
        Return the fp32 logits of the next token, (B, vocab_size), valid until the next step."""
        cache.advance()
        # The first pass with a cache of this shape is not recorded: it loads what the kernels need.
        if self.recorded and cache.steps > 1 and not cache.replay:
            try:
                cache.replay = record(partial(self._logits, cache=cache), tokens)
            except RuntimeError as error:
                self.recorded = False
                say(f"no CUDA graph could be recorded, so generation is slower: {error}")
        return cache.replay(tokens) if cache.replay else self._logits(tokens, cache)

    @without_cudnn()
    def _logits(self, tokens: Tensor, cache: Cache) -> Tensor:
        logits = self.forward(tokens, cache=cache).logits.float()
        if self.divided:  # processes that round differently could draw different tokens
            torch.distributed.broadcast(logits, src=0)
        return logits
