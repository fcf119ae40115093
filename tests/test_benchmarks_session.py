from typing import ClassVar

import pytest
from test_benchmarks_contenders import LLAMA, LLAMA_COMPILED, OURS, OURS_COMPILED

from benchmarks import session
from benchmarks.contenders import Contender
from benchmarks.report import size_table
from benchmarks.session import Plan, Session
from benchmarks.team import TeamError
from benchmarks.work import SIZES


class FakeTeam:
    """A contender that takes a second per step and a unit of memory; fails where it is told to."""

    alive: ClassVar[int]
    told: ClassVar[list]  # (name, command) in order
    fails_at: ClassVar[dict]  # (name, command) → reason

    def __init__(self, environments, folder):
        self.name, self.started = folder.name, 0.0
        FakeTeam.alive += 1

    def ask(self, command):
        verb = command["command"]
        if (self.name, verb) in FakeTeam.fails_at:
            raise TeamError(FakeTeam.fails_at[self.name, verb], "end of its log")
        FakeTeam.told.append((self.name, verb))
        engine = next(
            (v for k, v in session.ENGINE_NAMES.items() if k in self.name), "single process"
        )
        device = {"device": "cpu", "device_name": "CPU", "threads": 2}
        return [{
            "build": {**device, "loss": 8.8, "engine": engine},
            "steps": {"seconds": [1.0] * command.get("number", 0), "loss": 8.0},
            "peak": {"flops": 1e12, "shape": "2 × 2 × 2"},
            "memory": {"peak": 2**30, "free": (5 - FakeTeam.alive) * 2**30},
        }[verb]]  # fmt: skip

    def close(self):
        FakeTeam.alive -= 1


@pytest.fixture
def fake_teams(monkeypatch):
    FakeTeam.alive, FakeTeam.told, FakeTeam.fails_at = 0, [], {}
    monkeypatch.setattr(session, "Team", FakeTeam)
    monkeypatch.setattr(session, "obstacle", lambda *_: None)
    monkeypatch.setattr(Contender, "expected_bytes", lambda *_: 2**30)
    return FakeTeam


def measure(folder, *chosen, rounds=2, baseline=None):
    plan = Plan(list(chosen), baseline, rounds, 1, 0, "", True, 0)
    running = Session("test", SIZES["test"], plan, folder)
    running.measure()
    running.close()
    assert FakeTeam.alive == 0
    return running.report()


def test_contenders_take_turns_with_the_yardstick_in_every_round(fake_teams, tmp_path):
    found = measure(tmp_path, LLAMA, OURS)
    turns = [name for name, verb in fake_teams.told if verb in ("steps", "peak")]
    one_round = ["matmul", "ours-eager", "transformers-eager"]
    assert turns == ["matmul", *one_round, *one_round, "matmul"]
    assert (found.baseline, len(found.measured_peaks)) == ("ours-eager", 4)
    assert [r.name for r in found.results] == ["transformers-eager", "ours-eager"]


def test_where_not_all_fit_the_baseline_meets_every_one(fake_teams, tmp_path):
    chosen = [LLAMA, LLAMA_COMPILED, OURS, OURS_COMPILED]
    # Five fit: the yardstick, three of these, and room that the Llamas take again in their turns.
    found = measure(tmp_path, *chosen, baseline="transformers-eager")
    rounds = {r.name: sorted(r.step_seconds) for r in found.results}
    assert rounds == {
        "transformers-eager": [1, 2, 3, 4],
        "transformers-compiled": [1, 2],
        "ours-eager": [1, 2],
        "ours-compiled": [3, 4],
    }


def test_what_is_too_large_is_listed_and_does_not_stop_the_others(
    fake_teams, tmp_path, monkeypatch
):
    def size(contender, *_):
        return (9 if contender.compiled else 1) * 2**30

    monkeypatch.setattr(Contender, "expected_bytes", size)
    found = measure(tmp_path, OURS_COMPILED, OURS, LLAMA)
    assert found.missing == {"ours-compiled": "takes about 9.0 GiB, and 4.0 GiB are free"}
    assert [r.name for r in found.results] == ["ours-eager", "transformers-eager"]


@pytest.mark.parametrize("command", ["build", "steps"])
def test_a_failure_is_listed_with_its_log_shown(fake_teams, tmp_path, command, capsys):
    fake_teams.fails_at = {("ours-eager", command): "OutOfMemoryError: no room"}
    found = measure(tmp_path, OURS, LLAMA, Contender("litgpt", False))
    assert found.missing == {"ours-eager": "OutOfMemoryError: no room"}
    assert [r.name for r in found.results] == ["transformers-eager", "litgpt-eager"]
    assert "    end of its log" in capsys.readouterr().err
    assert "ours-eager: OutOfMemoryError" in size_table(found)


def test_who_is_stopped_has_the_rounds_that_were_played(fake_teams, tmp_path, monkeypatch):
    turns = []

    def turn(self, contender):
        turns.append(contender)
        if len(turns) == 5:
            raise SystemExit(143)
        measured_turn(self, contender)

    measured_turn = Session._turn
    monkeypatch.setattr(Session, "_turn", turn)
    chosen = [OURS, LLAMA, LLAMA_COMPILED, OURS_COMPILED]  # the last has to wait for room
    plan = Plan(chosen, "ours-eager", 2, 1, 0, "", True, 0)
    running = Session("test", SIZES["test"], plan, tmp_path)
    with pytest.raises(SystemExit):
        running.measure()
    running.close()
    found = running.report()
    rounds = {r.name: sorted(r.step_seconds) for r in found.results}
    assert rounds == {"ours-eager": [1, 2], "transformers-eager": [1], "transformers-compiled": [1]}
    assert found.missing == {"ours-compiled": "stopped before its first turn"}
    assert "STOPPED in round 2, before the end." in size_table(found)


def test_before_matrix_products_were_measured_there_is_nothing_to_report(fake_teams, tmp_path):
    plan = Plan([OURS], None, 1, 1, 0, "", True, 0)
    running = Session("test", SIZES["test"], plan, tmp_path)
    assert not running.measured_something
    running.measure()
    assert running.measured_something
    running.close()
    assert "STOPPED" not in size_table(running.report())


def test_an_engine_that_was_switched_off_is_not_measured(fake_teams, tmp_path, monkeypatch):
    monkeypatch.setitem(session.ENGINE_NAMES, "zero2", "DeepSpeed ZeRO-2")
    monkeypatch.setattr(Contender, "name", "quiet")  # the fake then calls itself single
    found = measure(tmp_path, Contender("ours", False, "zero2"))
    assert "not as DeepSpeed ZeRO-2" in found.missing["quiet"]
    assert "Nothing could be measured" in size_table(found)
