import math
import zlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lm.data.dataset import PackedDataset
from lm.data.tokenizer import open_tokenizer
from lm.training.validation import validate, validation_loader, yardsticks
from model import IGNORE_INDEX, LMConfig, Transformer
from model.transformer import TransformerOutput

SEQ_LEN = 16


class Lines(Dataset):
    """Sequences with these targets; every token of sequence i is i."""

    lengths = None

    def __init__(self, targets: list[list[int]]):
        self.targets = torch.tensor(targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int):
        return torch.full((len(self.targets[i]),), i), self.targets[i]


class LossIsTheTarget(nn.Module):
    """A model whose loss at a position is the target, or 0 if the target is ignored."""

    def forward(self, tokens, targets, reduction):
        assert reduction == "none"
        assert not torch.is_grad_enabled()
        return TransformerOutput(None, targets.masked_fill(targets == IGNORE_INDEX, 0).float())


@pytest.mark.parametrize(
    ("n", "most", "expected"),
    [(10, 0, [*range(10)]), (10, 1024, [*range(10)]), (101, 5, [0, 25, 50, 75, 100])],
)
def test_validation_samples_are_spread_over_the_split(accelerator, n, most, expected):
    loader = validation_loader(Lines([[i] * 4 for i in range(n)]), 4, most, accelerator)
    for _ in range(2):  # every validation reads the same samples
        assert [i for tokens, _ in loader for i in tokens[:, 0].tolist()] == expected


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_ignored_targets_do_not_count_anywhere(accelerator, batch_size):
    out = IGNORE_INDEX
    lines = Lines([[1, 2, 3, 4], [out, out, 5, 6], [out, out, out, 7], [out, out, out, out]])
    loader = validation_loader(lines, batch_size, 0, accelerator)
    result = validate(LossIsTheTarget(), loader, accelerator, bytes_per_token=2.0)
    assert result["loss"] == pytest.approx((1 + 2 + 3 + 4 + 5 + 6 + 7) / 7)
    assert result["bits_per_byte"] == pytest.approx(4 / math.log(2) / 2)
    assert result["perplexity"] == pytest.approx(math.exp(4))
    assert result["samples"] == 4
    loader = validation_loader(Lines([[out] * 4] * 3), batch_size, 0, accelerator)
    result = validate(LossIsTheTarget(), loader, accelerator, bytes_per_token=2.0)
    assert math.isnan(result["loss"])


@pytest.mark.parametrize("batches", [0, 1, 4])
def test_a_stop_request_ends_a_validation_before_the_next_batch(accelerator, batches):
    """After 4 of 5 batches, Accelerate has already read the last batch ahead."""
    model = LossIsTheTarget().train()
    loader = validation_loader(Lines([[1] * 4] * 5), 1, 0, accelerator)
    read = []
    model.register_forward_hook(lambda *_: read.append(1))
    how = {"bytes_per_token": 2.0, "stops": lambda: len(read) == batches}
    assert validate(model, loader, accelerator, **how) is None
    assert len(read) == batches
    assert model.training
    assert not accelerator.gradient_state.end_of_dataloader
    assert validate(model, loader, accelerator, bytes_per_token=2.0)["samples"] == 5


@pytest.mark.parametrize("batch_size", [1, 64])
def test_validation_is_the_mean_over_samples_to_the_bit(packed, accelerator, batch_size):
    """Validation switches dropout off and draws no random number."""
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": SEQ_LEN, "dropout": 0.5}
    model = Transformer(LMConfig(**shape, vocab_size=dataset.vocab_size))
    loader = validation_loader(dataset, batch_size, 0, accelerator)
    random = torch.get_rng_state()
    result = validate(model.train(), loader, accelerator, dataset.bytes_per_token)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    total = 0.0
    with torch.no_grad():
        for tokens, targets in DataLoader(dataset, batch_size):
            per_token = model.eval()(tokens, targets, reduction="none").loss
            total += per_token.mean(dim=1).double().sum().item()
    assert result["loss"] == total / len(dataset)


def test_yardsticks_are_those_of_the_whole_validation_text(packed):
    data = PackedDataset(packed, "val", SEQ_LEN)
    text = "".join(open_tokenizer(packed).decode(data[i][0].tolist()) for i in range(len(data)))
    found = yardsticks(data, open_tokenizer(packed))
    assert found["gzip"] == pytest.approx(
        8 * len(zlib.compress(text.encode(), 9)) / len(text), 0.05
    )
    assert 0 < found["xz"] < 8
    assert found["untrained"] == pytest.approx(math.log2(400) / data.bytes_per_token)
