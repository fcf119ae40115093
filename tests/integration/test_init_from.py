"""Runs that start from the weights of another."""

import pytest
import torch
from conftest import Trained, train
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(packed, tmp_path_factory) -> Trained:
    """A run that has learned something."""
    flags = "--max_steps 40 --batch_size 8 --learning_rate 1e-2 --log_interval 40"
    return train("plain", 1, packed, tmp_path_factory.mktemp("finished") / "run", flags)


def assert_equal_bits(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(("engine", "processes"), [("plain", 1), ("zero2", 2)])
def test_the_first_step_is_where_the_finished_run_ended(
    engine, processes, finished, packed, tmp_path
):
    """With a learning rate that changes no bit, in bf16, which must not round what is loaded."""
    flags = f"--init_from {finished.path} --max_steps 1 --learning_rate 1e-30 --batch_size 8"
    started = train(engine, processes, packed, tmp_path / "run", flags)
    assert f"starts from: {finished.path}/weights, with a new optimizer" in started.out
    learned = finished.rows("val_loss")[-1]["val_loss"]
    assert learned < 4.5  # ln 400 is 6.0
    assert started.column("loss")[0] == pytest.approx(learned, abs=0.5)
    assert started.rows("val_loss")[-1]["val_loss"] == pytest.approx(learned, abs=2e-3)
    assert_equal_bits(started.tensors(), load_file(finished.path / "weights/model.safetensors"))
