from types import SimpleNamespace

import pytest

from common.errors import UsageError
from data.errors import DataError
from model import ConfigError
from training.engine import main_process
from training.engine.launch import Engine
from training.engine.main_process import on_every_process, on_main_process, require_the_same


def process(rank: int, processes: int = 2) -> SimpleNamespace:
    return SimpleNamespace(is_main_process=rank == 0, num_processes=processes)


@pytest.fixture
def broadcast(monkeypatch):
    """What the main process has sent, which the others get."""
    sent = []

    def exchange(answer: list) -> None:
        if sent:
            answer[:] = sent[0]
        else:
            sent.append(list(answer))

    monkeypatch.setattr(main_process, "broadcast_object_list", exchange)
    return sent


def never():
    raise AssertionError("asked on another process than the main one")


def test_the_main_process_decides_for_all(broadcast):
    first, second = (Engine(process(rank), "DDP", None) for rank in (0, 1))
    assert on_main_process(first, lambda: ("an", "answer")) == ("an", "answer")
    assert on_main_process(second, never) == ("an", "answer")


@pytest.mark.parametrize("error", [ConfigError, DataError])
def test_a_mistake_is_raised_on_all(broadcast, error):
    for rank, decide in enumerate((fails("the reason", error), never)):
        engine = Engine(process(rank), "DDP", None)
        with pytest.raises(error, match="the reason"):
            on_main_process(engine, decide)


def fails(words: str, kind=DataError):
    def attempt():
        raise kind(words)

    return attempt


def told(monkeypatch, *everyone) -> Engine:
    """An engine whose processes, on a machine each, have told each other this."""
    known = [(mine, f"node{rank}") for rank, mine in enumerate(everyone)]
    monkeypatch.setattr(main_process, "_gather", lambda engine, mine: known)
    return Engine(process(0, len(everyone)), "DDP", None, cpu_group="group")


def test_every_process_has_its_own_answer(monkeypatch):
    assert on_every_process(told(monkeypatch, None, None), lambda: 2) == 2


def test_a_process_that_is_alone_asks_nobody_and_raises_its_own():
    alone = Engine(process(0, 1), "single process", None)
    assert on_every_process(alone, lambda: 1) == 1
    with pytest.raises(DataError, match="no data"):
        on_every_process(alone, fails("no data"))


@pytest.mark.parametrize("attempt", [lambda: 1, fails("no data")])
def test_what_one_process_cannot_is_said_by_all_with_its_place(monkeypatch, attempt):
    engine = told(monkeypatch, None, DataError("no data"), ConfigError("none"))
    with pytest.raises(DataError, match=r"^no data \(only rank 1 on node1, rank 2 on node2 of 3 "):
        on_every_process(engine, attempt)


def test_what_no_process_can_is_said_as_it_is(monkeypatch):
    engine = told(monkeypatch, DataError("no data"), DataError("no data"))
    with pytest.raises(DataError, match=r"^no data$"):
        on_every_process(engine, fails("no data"))


def test_what_one_process_has_otherwise_than_the_main_one_is_said_by_all(monkeypatch):
    main, other = {"--dim": 8, "data": "a1"}, {"--dim": 8, "data": "b2"}
    with pytest.raises(UsageError, match=r"^rank 1 on node1 has data b2 \(not a1\): start all"):
        require_the_same(told(monkeypatch, main, other), other)
    other = {"engine": "DDP", "--dim": 8}
    with pytest.raises(UsageError, match=r"has data None \(not a1\), engine DDP \(not None\): "):
        require_the_same(told(monkeypatch, main, other), main)
    require_the_same(told(monkeypatch, main, main), main)
    require_the_same(Engine(process(0, 1), "single process", None), main)
