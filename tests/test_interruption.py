import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from lm.common.errors import LAUNCHER_ENDED
from lm.engine.engine import Engine, exit_rank
from lm.training import interruption
from lm.training.interruption import SIGNALS, StopRequest, how_to_resume, python

TIMED = interruption  # `clock` replaces its time


@pytest.fixture
def exit_codes(monkeypatch) -> list[int]:
    """Records the exit codes of os._exit, which does not end the process here."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.fixture
def request_of(clock):
    """Makes a StopRequest; restores the signal handlers at the end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def make(save_minutes: float = 0, rank: int = 0):
        place = {"num_processes": 1 + rank, "is_main_process": rank == 0}
        engine = Engine(SimpleNamespace(**place), "any engine", None)
        return StopRequest(engine, None, save_minutes, since=clock.now)

    yield make
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, LAUNCHER_ENDED]
)
def test_signals_request_a_stop_and_later_ones_exit_at_once(request_of, clock, exit_codes, number):
    stop = request_of()
    assert stop.reason() is None
    signal.raise_signal(number)
    clock.now += interruption.SAME_REQUEST_SECONDS
    signal.raise_signal(signal.SIGTERM)  # soon after: the same request
    named = "the end of its launcher" if number == LAUNCHER_ENDED else signal.Signals(number).name
    assert [stop.reason(), stop.reason()] == [named] * 2
    clock.now += 0.1
    signal.raise_signal(LAUNCHER_ENDED)  # a launcher may end while its ranks save
    assert exit_codes == []
    signal.raise_signal(signal.SIGTERM)
    assert exit_codes == [128 + signal.SIGTERM]


def test_a_hangup_stays_ignored_under_nohup(request_of, exit_codes):
    request_of()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = request_of()
    signal.raise_signal(signal.SIGHUP)
    assert stop.reason() is None


def test_a_later_interrupt_ends_no_kernel_of_a_notebook(request_of, clock, exit_codes, monkeypatch):
    monkeypatch.setenv(interruption.LIVES_ON, "1")
    request_of()
    signal.raise_signal(signal.SIGINT)
    clock.now += interruption.SAME_REQUEST_SECONDS + 0.1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert exit_codes == []


def test_the_next_save_is_due_save_minutes_after_the_last_save(request_of, clock):
    stop, never = request_of(save_minutes=0.5), request_of()
    for _ in range(2):
        for seconds, due in ((30, False), (0.1, True)):
            clock.now += seconds
            assert (stop.reason(), stop.time_to_save) == (None, due)
            assert (never.reason(), never.time_to_save) == (None, False)
        stop.saved()


def test_a_request_to_one_rank_makes_all_ranks_stop_or_save(request_of, clock, monkeypatch):
    others = []
    monkeypatch.setattr(Engine, "largest", lambda self, mine: max(mine, *others))
    stop = request_of(save_minutes=0.5, rank=1)
    clock.now += 1e9  # only the main process decides when to save
    for requests, reason, saves in (
        ([interruption.NOTHING], None, False),
        ([interruption.SAVE], None, True),
        ([interruption.SAVE, signal.SIGINT], "SIGINT", False),  # a stop saves too
        ([signal.SIGTERM, interruption.TIME_LIMIT], "the time limit", False),
    ):
        others[:] = map(int, requests)
        assert (stop.reason(), stop.time_to_save) == (reason, saves)


@pytest.mark.parametrize("earlier", ["", r" --resume=my\ runs/a", " --resume 'my runs/a'"])
def test_the_command_that_resumes_is_the_typed_command_with_resume_added(monkeypatch, earlier):
    for name in ("RESUME_WITH", "RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    again = "--dim 8 --resume 'my runs/b'"
    before = ["--resume", "my runs/a"] if earlier else []
    monkeypatch.setattr(sys, "argv", ["train.py", *before, "--dim", "8"])
    assert how_to_resume(Path("my runs/b")) == f"{python()} train.py {again}"
    monkeypatch.setenv("RANK", "0")  # under a launcher, whose flags are unknown
    assert how_to_resume("my runs/b") == "the same command with --resume 'my runs/b'"
    monkeypatch.setenv("RESUME_WITH", f"bash run_accelerate.sh{earlier} --dim 8")
    assert how_to_resume("my runs/b") == f"bash run_accelerate.sh {again}"


@pytest.mark.parametrize(("error", "codes"), [(None, [0]), (SystemExit(2), [2]), (KeyError(), [])])
def test_a_rank_exits_at_once_unless_it_prints_a_traceback(monkeypatch, exit_codes, error, codes):
    monkeypatch.setenv("RANK", "1")
    with suppress(SystemExit, KeyError):
        try:
            if error:
                raise error
        finally:
            exit_rank()
    assert exit_codes == codes
