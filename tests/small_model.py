"""A model for tests of what is done with models."""

import torch

from model import LMConfig, Transformer


def opinionated(vocab_size: int, seq_len: int) -> Transformer:
    """A small model that is far from indifferent between tokens."""
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    model = Transformer(LMConfig(vocab_size=vocab_size, max_seq_len=seq_len, **shape)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model
