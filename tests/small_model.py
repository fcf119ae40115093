"""Small models for tests, and a loss by hand."""

import math
from pathlib import Path

import torch

from lm.data.tokenizer import copy_tokenizer
from lm.formats.portable import save_portable
from model import IGNORE_INDEX, LMConfig, Transformer
from model.lora import LoRA, add_lora, is_adapter


def opinionated(vocab_size: int, seq_len: int, **changes) -> Transformer:
    """Return a small model whose predictions are far from uniform."""
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, **changes}
    model = Transformer(LMConfig(vocab_size=vocab_size, max_seq_len=seq_len, **shape)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model


def save_model(folder: Path, model: Transformer, tokenizer: Path) -> Path:
    """Write portable weights and a copy of the tokenizer into `folder`; return `folder`."""
    save_portable(folder, model.config, {name: p.data for name, p in model.named_parameters()})
    copy_tokenizer(tokenizer, folder)
    return folder


def adapted(only_lora: bool = True, module_name: str = "layers", **changes) -> Transformer:
    """Return the model of `opinionated` with LoRA adapters. No matrix of an adapter is zero."""
    model = opinionated(vocab_size=50, seq_len=16, **changes)
    add_lora(model, LoRA(4, 6.0, module_name, only_lora))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data.normal_(0, 0.3)
    return model


def loss_of_sampled_pieces(
    logits: torch.Tensor, targets: torch.Tensor, n_parts: int
) -> torch.Tensor:
    """Return the mean loss of logits (tokens, pieces). A token is compared with all targets, and
    with every n-th of the other pieces, which counts n times; the sum of the targets decides where
    these begin. A few others are shared, so that the rest can be divided by n."""
    shared = sorted(set(targets[targets != IGNORE_INDEX].tolist()))
    others = [piece for piece in range(logits.shape[1]) if piece not in shared]
    more = len(others) % n_parts
    total = int(targets[targets != IGNORE_INDEX].sum())
    losses = []
    for i, (row, target) in enumerate(zip(logits, targets.tolist(), strict=True)):
        mine = others[more + (i + total) % n_parts :: n_parts]
        terms = torch.cat([row[shared + others[:more]], row[mine] + math.log(n_parts)])
        if target != IGNORE_INDEX:
            losses.append(terms.logsumexp(0) - row[target])
    return torch.stack(losses).mean()
