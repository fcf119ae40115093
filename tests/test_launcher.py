"""What run_accelerate.sh's launcher says where nothing could be launched."""

import inspect

import pytest
import torch

from training import launcher


def test_pytorchs_launcher_waits_for_no_other_machine(monkeypatch):
    """The name is PyTorch's own and private: where it is another, this says so."""
    waits = launcher.SimpleElasticAgent._exit_barrier
    assert "self._exit_barrier()" in inspect.getsource(launcher.SimpleElasticAgent._invoke_run)
    monkeypatch.setattr(launcher.SimpleElasticAgent, "_exit_barrier", waits)
    monkeypatch.setattr(launcher, "main", lambda: None)
    assert launcher.launch() == 0
    assert launcher.SimpleElasticAgent._exit_barrier is not waits
    assert launcher.SimpleElasticAgent._exit_barrier(None) is None


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("port `29500` is used\nand more"),
        torch.distributed.DistStoreError("port `29500` is used\nand more"),
        torch.distributed.DistNetworkError("port `29500` is used\nand more"),
    ],
)
def test_machines_that_cannot_meet_are_one_line(monkeypatch, capsys, error):
    def fail():
        raise error

    monkeypatch.setattr(launcher, "main", fail)
    assert launcher.launch() == 2
    assert capsys.readouterr().err == (
        "run_accelerate.sh: error: the machines cannot meet: port `29500` is used\n"
    )
