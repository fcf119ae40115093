from types import SimpleNamespace
from unittest.mock import Mock

from conftest import error_of

from lm.common.errors import UsageError
from lm.engine import agreement
from lm.engine.agreement import on_every_process, on_main_process, require_the_same
from lm.engine.engine import Engine
from model import ConfigError


def engine_with_answers(monkeypatch, *everyone, rank: int = 0) -> Engine:
    """Return the engine of rank `rank`; `_gather` gets everyone[i] and host node{i} from rank i."""
    known = [(mine, f"node{at}") for at, mine in enumerate(everyone)]
    monkeypatch.setattr(agreement, "_gather", lambda engine, mine: known)
    accelerator = SimpleNamespace(is_main_process=rank == 0, num_processes=len(everyone))
    return Engine(accelerator, "DDP", None, cpu_group="group")


def never():
    raise AssertionError("called on a process other than the main process")


def test_the_main_process_decides_for_all(monkeypatch):
    second = engine_with_answers(monkeypatch, (("an", "answer"), None), None, rank=1)
    assert on_main_process(second, never) == ("an", "answer")
    second = engine_with_answers(monkeypatch, (None, UsageError("the reason")), None, rank=1)
    assert error_of(on_main_process, second, never) == "the reason"


def test_an_error_on_some_processes_names_rank_and_host_and_an_error_on_all_does_not(monkeypatch):
    engine = engine_with_answers(monkeypatch, None, UsageError("no data"), ConfigError("none"))
    said = "no data (of 3 processes only rank 1 on node1, rank 2 on node2: "
    for attempt in (lambda: None, Mock(side_effect=UsageError("no data"))):
        assert error_of(on_every_process, engine, attempt).startswith(said)
    engine = engine_with_answers(monkeypatch, UsageError("no data"), UsageError("no data"))
    assert error_of(on_every_process, engine, lambda: None) == "no data"


def test_a_difference_from_the_main_process_is_an_error_on_all(monkeypatch):
    main, other = {"--dim": 8, "data": "a1"}, {"--dim": 8, "data": "b2"}
    line = error_of(require_the_same, engine_with_answers(monkeypatch, main, other), other)
    assert line.startswith("rank 1 on node1 has data b2 (not a1): start all")
    other = {"engine": "DDP", "--dim": 8}
    line = error_of(require_the_same, engine_with_answers(monkeypatch, main, other), main)
    assert "has data None (not a1), engine DDP (not None): " in line
    require_the_same(engine_with_answers(monkeypatch, main, main), main)
