"""The work of one optimizer step, equal for every contender: shapes, precision, text."""

import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import REPOSITORY
from lm.common.errors import UsageError
from lm.data.dataset import PackedDataset
from lm.data.shards import read_description
from model import LMConfig, Transformer

DATA = "out/data/builtin-6400"  # built-in text with MiniMind's vocabulary size, 6,400


@dataclass(frozen=True)
class Work:
    """One optimizer step on one process.

    All models are Llama-like, with tied embeddings, grouped-query attention and SwiGLU. `LMConfig`
    computes hidden_dim.
    """

    dim: int
    n_layers: int
    batch_size: int  # sequences per micro-batch
    seq_len: int  # tokens per sequence
    n_heads: int = 8
    n_kv_heads: int = 2
    accumulation_steps: int = 1  # micro-batches per optimizer step
    dtype: str = "bfloat16"  # or float32
    vocab_size: int = 6400
    data: str = DATA  # a folder of prepared text

    @cached_property
    def config(self) -> LMConfig:
        return LMConfig(
            dim=self.dim,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            vocab_size=self.vocab_size,
            max_seq_len=self.seq_len,
        )

    @cached_property
    def counts(self) -> tuple[int, int]:
        """(parameters, model FLOPs per token), counted in the same way for every contender."""
        with torch.device("meta"):  # shapes without memory
            model = Transformer(self.config)
        return model.num_parameters(), model.flops_per_token(self.seq_len)

    def on(self, data: str) -> "Work":
        """Return the same work on another text, with its vocabulary size. Prepare the built-in text
        if it is missing. Raises UsageError if preparing fails or `data` has no prepared data."""
        path = Path(data).absolute()
        if data == DATA and not (path := REPOSITORY / DATA).exists():
            words = [sys.executable, "-m", "scripts.prepare_data", "--out", str(path)]
            words += ["--vocab_size", "6400"]
            if subprocess.run(words, stdout=sys.stderr, cwd=REPOSITORY).returncode:
                raise UsageError(f"{path}: the built-in text could not be prepared")
        return replace(self, data=str(path), vocab_size=read_description(path)["vocab_size"])

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step on one process."""
        return self.batch_size * self.seq_len * self.accumulation_steps

    def flags(self) -> list[str]:
        """Return the flags of the training script for this work."""
        same = ("dim", "n_layers", "n_heads", "n_kv_heads", "batch_size", "accumulation_steps")
        values = {name: getattr(self, name) for name in (*same, "dtype", "data")}
        values["max_seq_len"] = self.seq_len
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]

    def batches(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Return micro-batches for a peer: (tokens, targets), each (batch_size, seq_len). They are
        in memory before the measurement starts, so that reading takes no time."""
        text = PackedDataset(self.data, "train", self.seq_len)
        made = []
        for first in range(0, max(4, self.accumulation_steps) * self.batch_size, self.batch_size):
            samples = [text[i % len(text)] for i in range(first, first + self.batch_size)]
            tokens, targets = map(torch.stack, zip(*samples, strict=True))
            made.append((tokens.to(device), targets.to(device)))
        return made


SIZES = {  # "360m" has the shape of Method 1 in README.md
    "3m": Work(dim=192, n_layers=4, batch_size=16, seq_len=256, n_heads=4),
    "26m": Work(dim=512, n_layers=8, batch_size=8, seq_len=512),
    "104m": Work(dim=768, n_layers=16, batch_size=8, seq_len=512),
    "360m": Work(dim=1024, n_layers=32, batch_size=24, seq_len=1024),
    "test": Work(dim=64, n_layers=2, batch_size=2, seq_len=32, n_heads=4, dtype="float32"),
}
