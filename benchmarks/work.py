"""What one optimizer step consists of, the same for every contender: shapes, precision, tokens."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from model import LMConfig, Transformer

VOCAB_SIZE = 6400


@dataclass(frozen=True)
class Work:
    """One training step on one process.

    All models are Llama-like with tied embeddings, grouped-query attention and SwiGLU of the
    hidden_dim that `LMConfig` computes.
    """

    dim: int
    n_layers: int
    batch_size: int  # sequences per micro-batch
    seq_len: int  # tokens per sequence
    n_heads: int = 8
    n_kv_heads: int = 2
    accumulation_steps: int = 1  # micro-batches per optimizer step
    dtype: str = "bfloat16"  # or float32
    seed: int = 42

    @cached_property
    def config(self) -> LMConfig:
        return LMConfig(
            dim=self.dim,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            vocab_size=VOCAB_SIZE,
            max_seq_len=self.seq_len,
        )

    @cached_property
    def counts(self) -> tuple[int, int]:
        """(parameters, model FLOPs per token), counted alike for every contender."""
        with torch.device("meta"):  # shapes without memory
            model = Transformer(self.config)
        return model.num_parameters(), model.flops_per_token(self.seq_len)

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step on one process."""
        return self.batch_size * self.seq_len * self.accumulation_steps

    def batches(self, rank: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """(tokens, targets), each (batch_size, seq_len): random, equal for equal seed and rank.

        Enough of them for one optimizer step and at least four. They are made before the clock
        starts, so reading data takes no contender any time.
        """
        generator = torch.Generator().manual_seed(self.seed + rank)
        shape = (self.batch_size, self.seq_len + 1)
        made = []
        for _ in range(max(4, self.accumulation_steps)):
            text = torch.randint(VOCAB_SIZE, shape, generator=generator)
            tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            made.append((tokens.to(device), targets.to(device)))
        return made


# "test" is for the tests: a step takes milliseconds. The recipe is Method 1 of the README.
SIZES = {
    "26m": Work(dim=512, n_layers=8, batch_size=8, seq_len=512),
    "104m": Work(dim=768, n_layers=16, batch_size=8, seq_len=512),
    "360m": Work(dim=1024, n_layers=32, batch_size=24, seq_len=1024),
    "test": Work(dim=64, n_layers=2, batch_size=2, seq_len=32, n_heads=4),
}
