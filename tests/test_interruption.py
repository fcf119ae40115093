import errno
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from training import interruption
from training.engine.launch import Engine
from training.interruption import (
    CHECKPOINT_WRITER,
    SAME_REQUEST_SECONDS,
    SAVE,
    SIGNALS,
    TIME_LIMIT,
    StopRequest,
    how_to_resume,
    leave,
    python,
)


class Clock:
    """In place of the module `time`: stands still until told otherwise."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(interruption, "time", clock)
    return clock


@pytest.fixture
def left(monkeypatch) -> list[int]:
    """The exit codes with which the process would have ended at once."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.fixture
def request_of(clock):
    """Makes a StopRequest; signals are put back in the end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    alone = Engine(SimpleNamespace(num_processes=1, is_main_process=True), "single process", None)

    def make(
        time_limit: float | None = None, engine: Engine = alone, save_minutes: float = 0
    ) -> StopRequest:
        return StopRequest(engine, time_limit, save_minutes, since=clock.now)

    yield make
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_reason_to_stop_from_then_on(request_of, left, number):
    stop = request_of()
    assert stop.reason() is None
    signal.raise_signal(number)
    assert [stop.reason(), stop.reason()] == [signal.Signals(number).name] * 2
    assert left == []


def test_the_same_signal_from_two_sides_is_one_request(request_of, clock, left):
    stop = request_of()
    signal.raise_signal(signal.SIGINT)
    clock.now += SAME_REQUEST_SECONDS
    signal.raise_signal(signal.SIGTERM)
    assert stop.reason() == "SIGINT"
    assert left == []


def test_a_second_request_ends_the_process_at_once(request_of, clock, left):
    request_of()
    signal.raise_signal(signal.SIGINT)
    clock.now += SAME_REQUEST_SECONDS + 0.1
    signal.raise_signal(signal.SIGTERM)
    assert left == [128 + signal.SIGTERM]


def test_the_time_limit_counts_minutes_from_the_programs_start(request_of, clock):
    stop, never = request_of(1.5), request_of(None)
    clock.now += 90
    assert stop.reason() is None
    clock.now += 0.1
    assert stop.reason() == "the time limit"
    clock.now += 1e9
    assert never.reason() is None


def test_all_ranks_stop_for_what_one_of_them_was_told(request_of, monkeypatch):
    """And for the time limit rather than for a signal, where both have come."""
    engine = Engine(SimpleNamespace(num_processes=2, is_main_process=False), "DDP", None)
    others = []
    monkeypatch.setattr(Engine, "largest", lambda self, mine: max(mine, *others))
    stop = request_of(engine=engine)
    for told, reason in ((0, None), (signal.SIGTERM, "SIGTERM"), (TIME_LIMIT, "the time limit")):
        others[:] = [0, int(told)]
        assert stop.reason() == reason


def test_a_checkpoint_is_due_so_many_minutes_after_the_last_one(request_of, clock):
    stop, never = request_of(save_minutes=0.5), request_of()
    for _ in range(2):
        clock.now += 30
        assert stop.reason() is None
        assert not stop.time_to_save
        clock.now += 0.1
        assert stop.reason() is None
        assert stop.time_to_save
        stop.saved()
        assert not stop.time_to_save
    clock.now += 1e9
    assert never.reason() is None
    assert not never.time_to_save


def test_the_main_process_decides_for_all_when_to_save(request_of, clock, monkeypatch):
    rank_1 = Engine(SimpleNamespace(num_processes=2, is_main_process=False), "DDP", None)
    others = [0]
    monkeypatch.setattr(Engine, "largest", lambda self, mine: max(mine, *others, 0))
    stop = request_of(engine=rank_1, save_minutes=0.5)
    clock.now += 1e9
    assert stop.reason() is None
    assert not stop.time_to_save
    others[:] = [SAVE]
    assert stop.reason() is None
    assert stop.time_to_save
    others[:] = [SAVE, signal.SIGINT]  # which saves as well
    assert stop.reason() == "SIGINT"


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        (["train.py", "--dim", "8"], "train.py --dim 8 --resume 'my runs/a'"),
        (["train.py", "--resume", "auto", "--dim", "8"], "train.py --dim 8 --resume 'my runs/a'"),
    ],
)
def test_the_command_that_goes_on_is_the_one_that_was_typed(monkeypatch, typed, again):
    monkeypatch.delenv("RESUME_WITH", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(sys, "argv", typed)
    assert how_to_resume(Path("my runs/a")) == f"{python()} {again}"


def test_python_is_named_as_short_as_it_can_be_typed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for executable, found, typed in (
        ("/usr/bin/python", "/usr/bin/python", "python"),
        ("/usr/bin/python", "/other/python", "/usr/bin/python"),
        ("/usr/bin/python", None, "/usr/bin/python"),
        (f"{tmp_path}/.venv/bin/python", None, ".venv/bin/python"),
        # run_accelerate.sh puts it on its own PATH; the user's may have another.
        (f"{tmp_path}/.venv/bin/python", f"{tmp_path}/.venv/bin/python", ".venv/bin/python"),
    ):
        monkeypatch.setattr(sys, "executable", executable)
        monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
        assert python() == typed


@pytest.mark.parametrize("name", ["RANK", "ACCELERATE_MIXED_PRECISION"])  # of several, of one
def test_a_launchers_command_is_named_where_it_is_known(monkeypatch, name):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(name, "no")
    monkeypatch.delenv("RESUME_WITH", raising=False)
    assert how_to_resume(Path("runs/a")) == "the same command with --resume runs/a"
    for earlier in ("", " --resume auto", r" --resume=my\ runs/a", r" --resume my\ runs/a"):
        monkeypatch.setenv("RESUME_WITH", f"bash run_accelerate.sh{earlier} --dim 64")
        assert how_to_resume(Path("runs/a")) == "bash run_accelerate.sh --dim 64 --resume runs/a"


@pytest.mark.parametrize(("error", "codes"), [(None, [0]), (SystemExit(2), [2]), (KeyError(), [])])
def test_a_rank_leaves_at_once_unless_there_is_a_traceback_to_show(monkeypatch, left, error, codes):
    monkeypatch.setenv("RANK", "1")
    with suppress(SystemExit, KeyError):
        try:
            if error:
                raise error
        finally:
            leave()
    assert left == codes


def test_a_rank_leaves_without_a_word_where_its_output_cannot_be_written(monkeypatch, left):
    monkeypatch.setenv("RANK", "0")
    full = OSError(errno.ENOSPC, "no space left")
    monkeypatch.setattr(sys, "stdout", None)  # closed
    monkeypatch.setattr(sys, "stderr", Mock(flush=Mock(side_effect=full)))
    leave()
    assert left == [0]
    sys.stderr.flush.assert_called_once()


def test_a_rank_leaves_when_its_checkpoint_is_written(monkeypatch, left):
    monkeypatch.setenv("RANK", "0")
    written = threading.Event()
    writer = threading.Timer(0.01, written.set)
    writer.name = CHECKPOINT_WRITER
    writer.start()
    leave()
    assert written.is_set()
    assert left == [0]


def test_a_rank_that_leaves_waits_for_no_library(monkeypatch, left):
    monkeypatch.setenv("RANK", "0")
    with ThreadPoolExecutor() as pool:  # whose threads end when they are told, in here never
        pool.submit(int).result()
        leave()
        assert left == [0]
