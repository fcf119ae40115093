"""What is expected of memory and traffic, against a network device and resident memory."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import engines
from benchmarks.work import Work

# What is expected is in tests/test_memory.py and test_communication.py.
pytestmark = [pytest.mark.slow, pytest.mark.variant]
WORK = Work(dim=128, n_layers=4, batch_size=2, seq_len=64, accumulation_steps=2, dtype="float32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's traffic passes no network device")
def test_bytes_and_memory_are_those_expected_and_the_losses_one():
    if obstacle := engines.namespace_obstacle():
        pytest.skip(f"no network namespace of one's own here: {obstacle}")
    options = SimpleNamespace(steps=4, processes=2)
    rows = [engines.measure(name, WORK, options) for name in ("ddp", "zero2")]
    for row in rows:
        assert row["sent"] == pytest.approx(row["sent_expected"], rel=0.05), row["engine"]
        expected = row["libraries"] + row["peak_expected"]
        assert row["peak"] == pytest.approx(expected, rel=0.10), row["engine"]
    ddp, zero2 = (row["losses"] for row in rows)
    assert ddp == pytest.approx(zero2, abs=1e-4)
