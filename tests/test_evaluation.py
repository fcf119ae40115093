import math

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from data.dataset import PackedDataset
from model import LMConfig, Transformer
from model.transformer import TransformerOutput
from training.validation import evaluate, validation_loader

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
    result = evaluate(LossIsTheSampleNumber(), loader, accelerator, bytes_per_token=2.0)
    assert result["loss"] == pytest.approx(sum(range(n)) / n)
    assert result["samples"] == n


def test_bits_per_byte_and_perplexity_by_hand(accelerator):
    loader = validation_loader(Numbered(3), 2, 0, accelerator)  # losses 0, 1, 2
    result = evaluate(LossIsTheSampleNumber(), loader, accelerator, bytes_per_token=4.0)
    assert result["loss"] == pytest.approx(1.0)
    assert result["perplexity"] == pytest.approx(2.718281828)
    assert result["bits_per_byte"] == pytest.approx(1.442695041 / 4)


def test_a_hopeless_loss_has_a_finite_perplexity(accelerator):
    loader = validation_loader(Numbered(2000), 500, 0, accelerator)
    result = evaluate(LossIsTheSampleNumber(), loader, accelerator, bytes_per_token=1.0)
    assert math.isfinite(result["perplexity"])


def test_the_loss_is_the_plain_mean_over_all_tokens(packed, accelerator):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    torch.manual_seed(0)
    model = Transformer(
        LMConfig(dim=32, n_layers=1, n_heads=4, vocab_size=dataset.vocab_size, max_seq_len=SEQ_LEN)
    )
    loader = validation_loader(dataset, 5, 0, accelerator)
    result = evaluate(model, loader, accelerator, dataset.bytes_per_token)
    with torch.no_grad():
        losses = [model(x[None], y[None]).loss.item() for x, y in dataset]
    assert result["samples"] == len(dataset)
    assert result["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    n_bytes = len(dataset) * SEQ_LEN * dataset.bytes_per_token
    bits = sum(losses) * SEQ_LEN / math.log(2)
    assert result["bits_per_byte"] == pytest.approx(bits / n_bytes, rel=1e-6)


def test_dropout_is_off_while_evaluating_and_on_again_afterwards(packed, accelerator):
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
    first, second = (evaluate(model, loader, accelerator, 2.0)["loss"] for _ in range(2))
    assert first == second
    assert model.training


def test_validation_draws_nothing_from_the_generator_of_dropout(packed, accelerator):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = validation_loader(dataset, 8, 16, accelerator)
    evaluate(LossIsTheSampleNumber(), loader, accelerator, 2.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_gradient_is_kept(packed, accelerator):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    config = LMConfig(
        dim=32, n_layers=1, n_heads=4, vocab_size=dataset.vocab_size, max_seq_len=SEQ_LEN
    )
    model = Transformer(config)
    evaluate(model, validation_loader(dataset, 8, 8, accelerator), accelerator, 2.0)
    assert all(p.grad is None for p in model.parameters())
