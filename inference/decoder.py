"""The model as it writes: one token after another, from weights that no longer change.

A `Transformer` computes all positions of a sequence at once, which is what training needs. Here
each position is computed once, its keys and values are kept, and a new token costs one pass over
the weights. That pass is as fast as the weights come out of memory, so they are laid out for it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import fused_attention, without_cudnn
from model.lora import weight_of
from model.transformer import Transformer, TransformerBlock


class Packed:
    """x → x Wᵀ, W being some weights of the same input under each other: one product for all.

    On a CPU a large W is reordered once into the blocks in which oneDNN reads it, as torch.compile
    does with frozen weights: products with one row or a few are about twice as fast. A small one in
    fp32 is not worth the 10 µs that a call of oneDNN costs.
    """

    def __init__(self, weights: list[Tensor], dtype: torch.dtype):
        self.weight = torch.cat([weight.detach() for weight in weights]).to(dtype)
        self.blocked = self.weight.device.type == "cpu" and _onednn_gains(self.weight)
        if self.blocked:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)

    def __call__(self, x: Tensor) -> Tensor:
        if self.blocked:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return F.linear(x, self.weight)


def _onednn_gains(weight: Tensor) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and weight.numel() >= 1 << 18


def packed(*layers: nn.Linear, dtype: torch.dtype) -> Packed:
    """Layers of the same input, with the adapters that they may have."""
    return Packed([weight_of(layer) for layer in layers], dtype)


class Block:
    """A `TransformerBlock` for writing."""

    def __init__(self, block: TransformerBlock, dtype: torch.dtype):
        attention, feed_forward = block.attention, block.feed_forward
        self.attention_norm = block.attention_norm.weight.detach().to(dtype)
        self.ffn_norm = block.ffn_norm.weight.detach().to(dtype)
        self.wqkv = packed(attention.wq, attention.wk, attention.wv, dtype=dtype)
        self.wo = packed(attention.wo, dtype=dtype)
        self.w13 = packed(feed_forward.w1, feed_forward.w3, dtype=dtype)
        self.w2 = packed(feed_forward.w2, dtype=dtype)


class Cache:
    """Keys and values of what a block has read, (B, n_kv_heads, capacity, head_dim) each."""

    def __init__(self, *shape: int, like: Tensor):
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)


class Decoder:
    """Reads prompts, then takes one token for each and gives the logits of the next.

    Column t of a row of the cache belongs to position t of that sequence. Prompts of different
    lengths are padded on the right, where no token of their own looks; what follows is written over
    the padding. A row so gives what it would give alone, but for rounding.

    Args:
        model: what it says now; if its weights change, make another decoder.
        dtype: of weights and cache; logits are always fp32.
        blocks: of the model, in order, if they are to be made anew for each pass.
    """

    def __init__(
        self,
        model: Transformer,
        dtype: torch.dtype | None = None,
        blocks: Iterable[Block] | None = None,
    ):
        self.config, self.pos_cis = model.config, model.pos_cis
        self.dtype = dtype or model.tok_embeddings.weight.dtype
        self.embedding = model.tok_embeddings.weight.detach().to(self.dtype)
        self.device = self.embedding.device
        self.blocks = blocks or [Block(block, self.dtype) for block in model.layers]
        self.caches: list[Cache] = []  # of each block
        self.last_norm = model.norm.weight.detach().to(self.dtype)
        self.output = packed(model.output, dtype=self.dtype)
        self.lengths: list[int] = []  # tokens read, of each sequence

    @torch.inference_mode()
    @without_cudnn()
    def read(self, prompts: list[list[int]], capacity: int) -> Tensor:
        """Begin with these prompts, forgetting what was there.

        Args:
            prompts: token ids, at least one each.
            capacity: positions to make room for; at least as many as the longest prompt, at most
                max_seq_len.

        Returns:
            fp32 logits of each prompt's next token, (B, vocab_size).
        """
        config, lengths = self.config, [len(prompt) for prompt in prompts]
        if not 0 < min(lengths) <= max(lengths) <= capacity <= config.max_seq_len:
            raise ValueError(
                f"prompts of {min(lengths)} to {max(lengths)} tokens, room for {capacity}, "
                f"max_seq_len {config.max_seq_len}"
            )
        shape = (len(prompts), config.n_kv_heads, capacity, config.head_dim)
        self.caches.clear()  # before others take the same memory
        self.caches = [Cache(*shape, like=self.embedding) for _ in range(config.n_layers)]
        longest = max(lengths)
        tokens = torch.tensor(
            [prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=self.device
        )
        self._set_lengths([0] * len(prompts))
        x = self._pass(tokens, self.pos_cis[:longest])  # (B, longest, dim)
        self._set_lengths(lengths)
        return self._logits(x[self._rows, self._columns - 1])

    @torch.inference_mode()
    def join(self, prompts: list[list[int]], capacity: int) -> Tensor:
        """`read`, beside the sequences that are there: these become the last rows. Every row then
        has room for `capacity` positions, or for as many as before, if that is more."""
        if not self.lengths:
            return self.read(prompts, capacity)
        self.make_room(capacity)
        caches, lengths, room = self.caches, self.lengths, self.room
        self.caches = []
        logits = self.read(prompts, room)
        for old, new in zip(caches, self.caches, strict=True):
            new.keys = torch.cat([old.keys, new.keys])
            new.values = torch.cat([old.values, new.values])
        self._set_lengths(lengths + self.lengths)
        return logits

    @torch.inference_mode()
    def make_room(self, capacity: int) -> None:
        """For so many positions of every sequence, if there is less."""
        more = (0, 0, 0, capacity - self.room)
        for cache in self.caches if capacity > self.room else ():
            cache.keys, cache.values = F.pad(cache.keys, more), F.pad(cache.values, more)

    @torch.inference_mode()
    @without_cudnn()
    def step(self, tokens: Tensor) -> Tensor:
        """One token for each sequence, (B,) int64 → fp32 logits of the next, (B, vocab_size).
        Raises ValueError: a sequence has no room left."""
        if max(self.lengths) >= self.room:
            raise ValueError(f"there is room for {self.room} tokens only")
        x = self._pass(tokens[:, None], self.pos_cis[self._columns][:, None])
        self.lengths = [length + 1 for length in self.lengths]
        self._columns += 1
        return self._logits(x[:, 0])

    def keep(self, rows: list[int]) -> None:
        """Go on with these sequences only, in this order."""
        for cache in self.caches:
            cache.keys, cache.values = cache.keys[rows], cache.values[rows]
        self._set_lengths([self.lengths[row] for row in rows])

    @property
    def room(self) -> int:
        """Positions of a sequence, prompt included."""
        return self.caches[0].keys.shape[2]

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self._rows = torch.arange(len(lengths), device=self.device)
        self._columns = torch.tensor(lengths, device=self.device)  # where the next tokens go

    def _pass(self, tokens: Tensor, pos_cis: Tensor) -> Tensor:
        """(B, T) through all blocks → (B, T, dim), before the last norm."""
        config = self.config
        heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        mask = self._mask()
        x = F.embedding(tokens, self.embedding)
        for block, cache in zip(self.blocks, self.caches, strict=True):
            qkv = block.wqkv(self._norm(x, block.attention_norm))
            qkv = qkv.view(*x.shape[:2], sum(heads), config.head_dim)
            qk, v = qkv.split_with_sizes((heads[0] + heads[1], heads[2]), dim=2)
            q, k = _turn(qk, pos_cis).split_with_sizes(heads[:2], dim=2)
            x = x + block.wo(self._attend(cache, q, k, v, mask).flatten(2))
            gate, value = block.w13(self._norm(x, block.ffn_norm)).chunk(2, dim=-1)
            x = x + block.w2(F.silu(gate) * value)
        return x

    def _attend(self, cache: Cache, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Keep k and v, (B, T, n_kv_heads, head_dim), and attend to all that is kept."""
        keys, values, longest = cache.keys, cache.values, max(self.lengths)
        if longest == 0:  # the prompts
            keys[:, :, : k.shape[1]] = k.transpose(1, 2)
            values[:, :, : k.shape[1]] = v.transpose(1, 2)
            return fused_attention(q, k, v, 0.0)
        if mask is None:
            keys[:, :, longest], values[:, :, longest] = k[:, 0], v[:, 0]
        else:
            keys[self._rows, :, self._columns] = k[:, 0]
            values[self._rows, :, self._columns] = v[:, 0]
        # The query heads that share a key/value head are the rows of one matrix.
        grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])
        seen = slice(longest + 1)
        out = F.scaled_dot_product_attention(grouped, keys[:, :, seen], values[:, :, seen], mask)
        return out.reshape(q.shape)

    def _mask(self) -> Tensor | None:
        """(B, 1, 1, columns), true where a row's next token looks; None where all look
        everywhere."""
        if len(set(self.lengths)) == 1:
            return None
        columns = torch.arange(max(self.lengths) + 1, device=self.device)
        return (columns <= self._columns[:, None])[:, None, None]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _logits(self, x: Tensor) -> Tensor:
        return self.output(self._norm(x, self.last_norm)).float()


def _turn(x: Tensor, pos_cis: Tensor) -> Tensor:
    """`apply_rotary_emb` by complex products, which are quicker where nothing is compiled: x of
    shape (B, T, heads, head_dim), pos_cis of shape (T, head_dim/2) or (B, T, head_dim/2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # (B, T, heads, head_dim/2)
    return torch.view_as_real(pairs * pos_cis.unsqueeze(-2)).flatten(-2).type_as(x)
