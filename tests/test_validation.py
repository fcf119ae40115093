import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from data.dataset import PackedDataset
from model import IGNORE_INDEX, LMConfig, Transformer
from model.transformer import TransformerOutput
from training.validation import validate, validation_loader

SEQ_LEN = 16


class Numbered(Dataset):
    """Sample i is made of the number i."""

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        return torch.full((4,), i), torch.full((4,), i)


class LossIsTheSampleNumber(nn.Module):
    def forward(self, tokens, targets, reduction):
        assert reduction == "none"
        return TransformerOutput(None, targets.float())


def chosen(n: int, batch_size: int, max_samples: int, accelerator) -> list[int]:
    loader = validation_loader(Numbered(n), batch_size, max_samples, accelerator)
    return [i for tokens, _ in loader for i in tokens[:, 0].tolist()]


def test_all_samples_are_read_when_zero_are_asked_for(accelerator):
    assert chosen(10, 4, 0, accelerator) == list(range(10))


def test_a_split_smaller_than_asked_for_is_read_whole_and_once(accelerator):
    assert chosen(10, 4, 1024, accelerator) == list(range(10))


def test_the_samples_are_spread_over_the_split(accelerator):
    assert chosen(101, 4, 5, accelerator) == [0, 25, 50, 75, 100]


def test_no_sample_is_read_twice(accelerator):
    picked = chosen(1000, 8, 300, accelerator)
    assert len(set(picked)) == len(picked) == 300


def test_every_validation_reads_the_same_samples(accelerator):
    loader = validation_loader(Numbered(50), 8, 20, accelerator)
    first, second = ([t[:, 0].tolist() for t, _ in loader] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (9, 4), (8, 4), (3, 4), (1, 8)])
def test_a_last_partial_batch_counts_by_its_samples(accelerator, n, batch_size):
    loader = validation_loader(Numbered(n), batch_size, 0, accelerator)
    result = validate(LossIsTheSampleNumber(), loader, accelerator, bytes_per_token=2.0)
    assert result["loss"] == pytest.approx(sum(range(n)) / n)
    assert result["samples"] == n


def test_bits_per_byte_and_perplexity_by_hand(accelerator):
    loader = validation_loader(Numbered(3), 2, 0, accelerator)  # losses 0, 1, 2
    result = validate(LossIsTheSampleNumber(), loader, accelerator, bytes_per_token=4.0)
    assert result["loss"] == pytest.approx(1.0)
    assert result["perplexity"] == pytest.approx(2.718281828)
    assert result["bits_per_byte"] == pytest.approx(1.442695041 / 4)


def test_a_hopeless_loss_has_a_finite_perplexity(accelerator):
    loader = validation_loader(Numbered(2000), 500, 0, accelerator)
    result = validate(LossIsTheSampleNumber(), loader, accelerator, bytes_per_token=1.0)
    assert math.isfinite(result["perplexity"])


def test_the_loss_is_the_plain_mean_over_all_tokens(packed, accelerator):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    torch.manual_seed(0)
    model = Transformer(
        LMConfig(dim=32, n_layers=1, n_heads=4, vocab_size=dataset.vocab_size, max_seq_len=SEQ_LEN)
    )
    loader = validation_loader(dataset, 5, 0, accelerator)
    result = validate(model, loader, accelerator, dataset.bytes_per_token)
    with torch.no_grad():
        losses = [model(x[None], y[None]).loss.item() for x, y in dataset]
    assert result["samples"] == len(dataset)
    assert result["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    n_bytes = len(dataset) * SEQ_LEN * dataset.bytes_per_token
    bits = sum(losses) * SEQ_LEN / math.log(2)
    assert result["bits_per_byte"] == pytest.approx(bits / n_bytes, rel=1e-6)


class Lines(Dataset):
    """Sequences of which only the targets given count."""

    def __init__(self, targets: list[list[int]]):
        self.targets = torch.tensor(targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int):
        return torch.arange(len(self.targets[i])), self.targets[i]


class LossIsTheTarget(nn.Module):
    """0 where the target is ignored, as the real model's is."""

    def forward(self, tokens, targets, reduction):
        assert reduction == "none"
        return TransformerOutput(None, targets.masked_fill(targets == IGNORE_INDEX, 0).float())


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_ignored_targets_count_for_nothing_wherever_they_are(accelerator, batch_size):
    out = IGNORE_INDEX
    lines = Lines([[1, 2, 3, 4], [out, out, 5, 6], [out, out, out, 7], [out, out, out, out]])
    loader = validation_loader(lines, batch_size, 0, accelerator)
    result = validate(LossIsTheTarget(), loader, accelerator, bytes_per_token=2.0)
    assert result["loss"] == pytest.approx((1 + 2 + 3 + 4 + 5 + 6 + 7) / 7)
    assert result["bits_per_byte"] == pytest.approx(4 / math.log(2) / 2)
    assert result["samples"] == 4


def test_of_nothing_but_ignored_targets_there_is_no_loss(accelerator):
    loader = validation_loader(Lines([[IGNORE_INDEX] * 4] * 3), 2, 0, accelerator)
    result = validate(LossIsTheTarget(), loader, accelerator, bytes_per_token=2.0)
    assert math.isnan(result["loss"])
    assert result["samples"] == 3


def test_a_model_that_ignores_targets_has_the_loss_of_the_others(packed, accelerator):
    """Every other target of real text, against the losses of each alone."""
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    torch.manual_seed(0)
    model = Transformer(
        LMConfig(dim=32, n_layers=1, n_heads=4, vocab_size=dataset.vocab_size, max_seq_len=SEQ_LEN)
    )
    samples = [(tokens, targets.clone()) for tokens, targets in dataset]
    for i, (_, targets) in enumerate(samples):
        targets[i % SEQ_LEN :: 2] = IGNORE_INDEX
    loader = validation_loader(samples, 5, 0, accelerator)
    result = validate(model, loader, accelerator, bytes_per_token=2.0)
    with torch.no_grad():
        losses = [
            loss.item()
            for (tokens, given), (_, targets) in zip(dataset, samples, strict=True)
            for loss, target in zip(
                model(tokens[None], given[None], reduction="none").loss[0], targets, strict=True
            )
            if target != IGNORE_INDEX
        ]
    assert 0 < len(losses) < len(dataset) * SEQ_LEN
    assert result["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_where_every_target_counts_it_is_the_mean_of_the_samples_means_to_the_bit(
    packed, accelerator, batch_size
):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    torch.manual_seed(0)
    model = Transformer(
        LMConfig(dim=32, n_layers=1, n_heads=4, vocab_size=dataset.vocab_size, max_seq_len=SEQ_LEN)
    )
    loader = validation_loader(dataset, batch_size, 0, accelerator)
    result = validate(model, loader, accelerator, dataset.bytes_per_token)
    total = 0.0
    with torch.no_grad():
        for tokens, targets in DataLoader(dataset, batch_size):
            per_token = model(tokens, targets, reduction="none").loss
            total += per_token.mean(dim=1).double().sum().item()
    assert result["loss"] == total / len(dataset)


def test_dropout_is_off_while_validating_and_on_again_afterwards(packed, accelerator):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    config = LMConfig(
        dim=32,
        n_layers=1,
        n_heads=4,
        vocab_size=dataset.vocab_size,
        max_seq_len=SEQ_LEN,
        dropout=0.5,
    )
    model = Transformer(config).train()
    loader = validation_loader(dataset, 8, 16, accelerator)
    first, second = (validate(model, loader, accelerator, 2.0)["loss"] for _ in range(2))
    assert first == second
    assert model.training


def test_validation_draws_nothing_from_the_generator_of_dropout(packed, accelerator):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = validation_loader(dataset, 8, 16, accelerator)
    validate(LossIsTheSampleNumber(), loader, accelerator, 2.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_gradient_is_kept(packed, accelerator):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    config = LMConfig(
        dim=32, n_layers=1, n_heads=4, vocab_size=dataset.vocab_size, max_seq_len=SEQ_LEN
    )
    model = Transformer(config)
    validate(model, validation_loader(dataset, 8, 8, accelerator), accelerator, 2.0)
    assert all(p.grad is None for p in model.parameters())
