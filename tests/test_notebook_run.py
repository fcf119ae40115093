"""main(argv) as a function of a program that lives on."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import TINY

from runs.checkpoint import read_state
from runs.folder import lock
from train_pretrain_accelerate import main
from training.run import Run
from training.start import left_as_found


@pytest.fixture
def flags(packed, tmp_path):
    """Flags of a tiny run into a folder of this name."""

    def of(name: str, *more: str) -> list[str]:
        where = ("--data", str(packed), "--out_dir", str(tmp_path), "--run_name", name)
        return [*TINY, *where, "--eval_samples", "8", "--max_steps", "2", *more]

    return of


def saved_steps(run: Path) -> int:
    return read_state(max((run / "checkpoints").glob("step-*[0-9]")))["step"]


def test_runs_follow_each_other_in_a_process_that_stays_as_it_was(flags, tmp_path, capsys):
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    command, environ = list(sys.argv), os.environ.copy()
    Accelerator(mixed_precision="no", cpu=True)  # made by others in the process
    main(flags("a", "--dtype", "bfloat16"))
    with pytest.raises(SystemExit) as ended:
        main(flags("b", "--dim", "33"))
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "dim 33 is not divisible by n_heads 4" in said
    main(flags("b", "--dtype", "float32"))
    main(flags("a", "--resume", str(tmp_path / "a"), "--max_steps", "3"))
    assert saved_steps(tmp_path / "a") == 3
    assert (tmp_path / "b" / "weights").exists()
    lock(tmp_path / "a" / "lock")  # by others, once it is over
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert (sys.argv, os.environ) == (command, environ)
    settings = (tmp_path / "a" / "settings.json").read_text(encoding="utf-8")
    assert '"train_pretrain_accelerate.py",\n    "--dim",' in settings
    assert sys.argv[0] not in settings


def test_compiled_code_does_not_pile_up_until_torch_stops_compiling():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def double(x):
        return x * 2

    for _ in range(2):
        with left_as_found(["program"]):
            torch.compile(double, backend=backend)(torch.ones(3))
    assert len(compiled) == 2


@pytest.fixture
def press(monkeypatch):
    """Has Ctrl-C pressed twice at once within a step; returns the steps that were begun."""
    steps = []

    def at(step: int) -> list:
        clip = Run.clip_gradients

        def interrupted(run: Run):
            steps.append(run)
            if len(steps) == step:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return clip(run)

        monkeypatch.setattr(Run, "clip_gradients", interrupted)
        return steps

    return at


def test_an_interrupt_saves_returns_and_names_the_command_that_goes_on(
    flags, tmp_path, capsys, press
):
    run, steps = tmp_path / "a", press(3)
    main(flags("a", "--max_steps", "100000"))
    assert len(steps) == saved_steps(run) == 3
    stopped = "stopped by SIGINT after step 3, saved; to go on:\n"
    said, found, command = capsys.readouterr().out.partition(stopped)
    assert found
    assert f"report: {run / 'report.html'}" in said
    assert ">not finished</td>" in (run / "report.html").read_text(encoding="utf-8")
    assert command.split()[1:3] == ["train_pretrain_accelerate.py", "--dim"]
    main(flags("a", "--max_steps", "4", "--resume", str(run)))
    assert saved_steps(run) == 4
