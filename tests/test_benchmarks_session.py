from argparse import Namespace
from typing import ClassVar

import pytest
import torch
from test_benchmarks_contenders import LLAMA, LLAMA_COMPILED, OURS, OURS_COMPILED

from benchmarks import session
from benchmarks.contenders import Contender
from benchmarks.report import size_table
from benchmarks.session import Session
from benchmarks.team import TeamError
from benchmarks.work import SIZES

ROOM = 4  # contenders that memory holds, of which one is left for what a peer takes again


class FakeTeam:
    """A contender that takes a second per step and a unit of memory; fails where it is told to."""

    alive: ClassVar[int]
    turns: ClassVar[list]  # names, in order
    fails_at: ClassVar[dict]  # (name, "build", "steps" or "trace") → reason

    def __init__(self, environments, folder):
        self.name, self.started = folder.name, 0.0
        FakeTeam.alive += 1

    def ask(self, question):
        what = {int: "steps", tuple: "build"}.get(type(question), "trace")
        if (self.name, what) in FakeTeam.fails_at:
            raise TeamError(FakeTeam.fails_at[self.name, what], "end of its log")
        if what == "steps":
            FakeTeam.turns.append(self.name)
        if what == "trace":
            FakeTeam.turns.append(question.name)
        engine = next(
            (v for k, v in session.ENGINE_NAMES.items() if k in self.name), "single process"
        )
        return [{"seconds": [1.0], "loss": 8.8, "engine": engine, "peak_bytes": 2**30}]

    def close(self):
        FakeTeam.alive -= 1


class FakeProducts:
    device = torch.device("cpu")

    def __init__(self, dtype):
        pass

    def peak(self):
        FakeTeam.turns.append("products")
        return 1e12, "2 × 2 × 2"


@pytest.fixture
def fake_teams(monkeypatch):
    FakeTeam.alive, FakeTeam.turns, FakeTeam.fails_at = 0, [], {}
    monkeypatch.setattr(session, "Team", FakeTeam)
    monkeypatch.setattr(session, "MatrixProducts", FakeProducts)
    monkeypatch.setattr(session, "obstacle", lambda _: None)
    free = lambda _: (ROOM - FakeTeam.alive) * 2**30 + 1  # noqa: E731
    monkeypatch.setattr(session, "free_memory", free)
    return FakeTeam


def new_session(folder, *chosen, rounds=2, trace=None):
    options = Namespace(
        contenders=list(chosen),
        rounds=rounds,
        steps=1,
        warmup_steps=0,
        trace=trace,
        keep_compile_cache=False,
    )
    return Session("test", SIZES["test"], options, folder)


def measure(folder, *chosen, **options):
    running = new_session(folder, *chosen, **options)
    running.measure()
    running.close()
    assert FakeTeam.alive == 0
    return running.report


def rounds_of(found):
    return {result.name: sorted(result.step_seconds) for result in found.played}


def test_each_plays_a_round_when_it_is_up_and_then_all_take_turns(fake_teams, tmp_path):
    found = measure(tmp_path, LLAMA, OURS, Contender("litgpt", False))
    assert fake_teams.turns == [
        "products",
        *("products", "ours-eager"),
        *("products", "ours-eager", "transformers-eager"),
        *("products", "ours-eager", "litgpt-eager"),
        *("products", "ours-eager", "transformers-eager", "litgpt-eager"),
        "products",
    ]
    assert (found.baseline.name, len(found.matrix_products)) == ("ours-eager", 6)
    assert rounds_of(found) == {
        "ours-eager": [1, 2, 3, 4],
        "transformers-eager": [2, 4],
        "litgpt-eager": [3, 4],
    }


def test_where_not_all_fit_the_baseline_meets_every_one(fake_teams, tmp_path):
    found = measure(tmp_path, LLAMA, LLAMA_COMPILED, OURS, OURS_COMPILED)
    assert rounds_of(found) == {
        "ours-compiled": [1, 2, 3, 4, 5, 6],
        "ours-eager": [2, 4],
        "transformers-eager": [3, 4],
        "transformers-compiled": [5, 6],
    }


def test_each_leaves_a_trace_when_nothing_more_is_measured_of_it(fake_teams, tmp_path):
    chosen = OURS_COMPILED, OURS, LLAMA, Contender("ours", True, fused=True)
    measure(tmp_path, *chosen, rounds=1, trace=tmp_path)
    turns = [turn for turn in fake_teams.turns if turn != "products"]
    assert turns == [
        *("ours-compiled", "ours-compiled", "ours-eager", "ours-compiled", "transformers-eager"),
        *("test-ours-eager.json.gz", "test-transformers-eager.json.gz"),
        *("ours-compiled", "ours-compiled+fused"),
        *("test-ours-compiled.json.gz", "test-ours-compiled-fused.json.gz"),
    ]


def test_who_leaves_no_trace_keeps_its_figures(fake_teams, tmp_path, capsys):
    fake_teams.fails_at = {("ours-eager", "trace"): "OSError: no room"}
    found = measure(tmp_path, OURS, LLAMA, trace=tmp_path)
    assert rounds_of(found) == {"ours-eager": [1, 2, 3], "transformers-eager": [2, 3]}
    assert found.missing == {}
    assert "ours-eager left no trace: OSError: no room" in capsys.readouterr().err


def test_beside_the_baseline_there_is_always_another(fake_teams, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "free_memory", lambda _: 0)
    found = measure(tmp_path, OURS_COMPILED, OURS, LLAMA, rounds=1)
    assert rounds_of(found) == {
        "ours-compiled": [1, 2, 3],
        "ours-eager": [2],
        "transformers-eager": [3],
    }


@pytest.mark.parametrize("what", ["build", "steps"])
def test_a_failure_is_listed_with_its_log_shown(fake_teams, tmp_path, what, capsys):
    fake_teams.fails_at = {("ours-eager", what): "OutOfMemoryError: no room"}
    found = measure(tmp_path, OURS, LLAMA, Contender("litgpt", False))
    assert found.missing == {"ours-eager": "OutOfMemoryError: no room"}
    assert [r.name for r in found.played] == ["transformers-eager", "litgpt-eager"]
    assert "    end of its log" in capsys.readouterr().err
    assert "ours-eager: OutOfMemoryError" in size_table(found)


def test_what_stands_in_the_way_of_one_does_not_stop_the_others(fake_teams, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "obstacle", lambda c: None if c.is_ours else "not installed")
    found = measure(tmp_path, LLAMA, OURS)
    assert found.missing == {"transformers-eager": "not installed"}
    assert rounds_of(found) == {"ours-eager": [1, 2]}


def test_who_is_stopped_has_the_rounds_that_were_played(fake_teams, tmp_path, monkeypatch):
    turns = []

    def turn(self, contender):
        turns.append(contender)
        if len(turns) == 5:
            raise SystemExit(143)
        measured_turn(self, contender)

    measured_turn = Session._turn
    monkeypatch.setattr(Session, "_turn", turn)
    # The last one has to wait for room.
    running = new_session(tmp_path, OURS_COMPILED, OURS, LLAMA, LLAMA_COMPILED)
    with pytest.raises(SystemExit):
        running.measure()
    running.close()
    assert rounds_of(running.report) == {
        "ours-compiled": [1, 2, 3],
        "ours-eager": [2],
    }
    late = dict.fromkeys(("transformers-eager", "transformers-compiled"), "no time left")
    assert running.report.missing == late
    assert "STOPPED in round 3, before the end." in size_table(running.report)


def test_who_is_stopped_before_the_first_round_has_nothing(fake_teams, tmp_path):
    assert "Nothing could be measured" in size_table(new_session(tmp_path, OURS).report)


def test_a_run_that_ends_well_does_not_say_that_it_was_stopped(fake_teams, tmp_path):
    assert "STOPPED" not in size_table(measure(tmp_path, OURS))


def test_an_engine_that_was_switched_off_is_not_measured(fake_teams, tmp_path, monkeypatch):
    monkeypatch.setattr(Contender, "name", "quiet")  # the fake then calls itself single
    found = measure(tmp_path, Contender("ours", False, "zero2"))
    assert "not as DeepSpeed ZeRO-2" in found.missing["quiet"]
    assert "Nothing could be measured" in size_table(found)
