"""What run_accelerate.sh's launcher says where nothing could be launched."""

import pytest
import torch

from training import launcher


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
