import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from benchmarks import engine_worker, engines
from benchmarks.work import Work
from common.errors import UsageError
from training.engine.memory import GIB

ROW = {"engine": "DDP", "losses": [6.5, 6.25], "seconds": 0.5, "sent": 2e6, "sent_expected": 2.1e6}
ROW |= {"libraries": GIB // 2, "peak": GIB, "peak_expected": GIB // 4}
OPTIONS = SimpleNamespace(steps=20)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def namespaces(monkeypatch):
    monkeypatch.setattr(engines, "namespace_obstacle", lambda: None)


def test_what_is_measured_stands_beside_what_was_expected(namespaces):
    rows = [ROW, ROW | {"engine": "DeepSpeed ZeRO-2", "losses": [6.5, 6.2501]}]
    title, _, first, second, _, note = engines.describe(rows, OPTIONS, on_gpu=False).split("\n")
    assert title.startswith("| engine | first loss | last loss | seconds per step | memory, GiB |")
    assert first == (
        "| DDP | 6.50000 | 6.25000 | 0.500 | 1.000 | 0.750 (-25.0%) | 0.250 (-50.0%) | 2.00 "
        "| 2.10 (+5.0%) |"
    )
    assert second.startswith("| DeepSpeed ZeRO-2 | 6.50000 | 6.25010 |")
    assert "of 20 steps" in note.replace("last of", "of")
    assert note.endswith("The last losses lie within 1.0e-04 of each other.")


@pytest.mark.parametrize("on_gpu", [True, False])
def test_where_nobody_can_count_there_is_no_figure_and_the_reason(monkeypatch, on_gpu):
    monkeypatch.setattr(engines, "namespace_obstacle", lambda: "unshare: Operation not permitted")
    said = engines.describe([ROW], OPTIONS, on_gpu=on_gpu)
    assert "| n/a | 2.10 |" in said
    reason = "a GPU's traffic passes no network device" if on_gpu else "Operation not permitted"
    assert reason in said


def test_bytes_are_those_of_the_loopback_device(tmp_path):
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive   |  Transmit\n face |bytes packets|bytes packets\n"
        "  eth0: 1 2 3 4 5 6 7 8 111 10\n"
        "    lo: 1 2 3 4 5 6 7 8 98765 10\n",
        encoding="ascii",
    )
    assert engine_worker.loopback_bytes(table) == 98765


def test_an_engine_is_launched_from_its_file_in_a_network_of_its_own(monkeypatch, namespaces):
    seen = {}

    def run(command, **options):
        seen.update(command=command, env=options["env"])
        out = command[command.index("benchmarks.engine_worker") + 1]
        with open(out, "w", encoding="utf-8") as file:
            json.dump(ROW, file)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("RANK", "1")
    work = Work(dim=32, n_layers=1, batch_size=1, seq_len=8, n_heads=2)
    row = engines.measure("zero2", work, SimpleNamespace(steps=3, processes=4))
    assert row == {"name": "zero2"} | ROW
    command = " ".join(seen["command"])
    assert command.startswith("unshare --net ")
    assert "configs/zero2.yaml --num_processes 4" in command
    assert "RANK" not in seen["env"]
    assert seen["env"]["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_launch_that_fails_is_one_line_with_what_it_said(monkeypatch, namespaces):
    failed = SimpleNamespace(returncode=1, stdout="noise\nValueError: no such thing\nmore\n")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: failed)
    work = Work(dim=32, n_layers=1, batch_size=1, seq_len=8, n_heads=2)
    with pytest.raises(ValueError, match="zero1 ended with 1: ValueError: no such thing"):
        engines.measure("zero1", work, SimpleNamespace(steps=3, processes=2))


def test_an_engine_that_fails_does_not_take_the_others_along(monkeypatch, namespaces, capsys):
    def measure(name, work, options):
        if name == "zero1":
            raise UsageError("zero1 ended with 1: no such thing")
        return {"name": name} | ROW

    monkeypatch.setattr(engines, "measure", measure)
    with pytest.raises(SystemExit) as ended:
        engines.main(["--engines", "zero1,zero2"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.err == "benchmarks.engines: error: zero1 ended with 1: no such thing\n"
    assert f"| {ROW['engine']} | " in said.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--engines zero9", "'zero9' is none of ddp, zero1, zero2"),
        ("--processes 1", "--processes: whole numbers from 2 on, not '1'"),
        ("--steps 2", "--steps: whole numbers from 3 on, not '2'"),
        ("--dim 7", "dim 7 is not divisible"),
        ("--dtype float16", "--dtype"),
    ],
)
def test_a_flag_that_cannot_work_is_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        engines.main(flags.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.engines: error: ")
    assert said in error
    assert error.count("\n") == 1


def test_an_engine_without_a_file_is_not_launched(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(engines, "config_file", lambda name: tmp_path / f"{name}.yaml")
    with pytest.raises(SystemExit):
        engines.main(["--engines", "zero1"])
    assert "there is no " in capsys.readouterr().err
