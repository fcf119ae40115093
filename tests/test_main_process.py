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


def exchanged(monkeypatch, *attempts) -> list:
    """What on_every_process returns or raises on each of the processes that make these attempts."""
    told = []
    engine = Engine(process(0, len(attempts)), "DDP", None, cpu_group="group")

    def gather(everyone: list, mine, group) -> None:
        assert group == "group"
        told.append(mine)
        everyone[:] = told + [(None, "host")] * (len(attempts) - len(told))
        everyone[:] = list(known.values()) or everyone

    monkeypatch.setattr(main_process.torch.distributed, "all_gather_object", gather)
    known, results = {}, []
    for final in (False, True):  # first to know what each tells, then with all of it
        if final:
            known = dict(enumerate(told))
        results = []
        for attempt in attempts:
            try:
                results.append(on_every_process(engine, attempt))
            except (UsageError, ConfigError) as error:
                results.append(error)
    return results


def fails(words: str, kind=DataError):
    def attempt():
        raise kind(words)

    return attempt


def test_every_process_has_its_own_answer(monkeypatch):
    assert exchanged(monkeypatch, lambda: 1, lambda: 2) == [1, 2]


def test_a_process_that_is_alone_asks_nobody_and_raises_its_own(monkeypatch):
    alone = Engine(process(0, 1), "single process", None)
    assert on_every_process(alone, lambda: 1) == 1
    with pytest.raises(DataError, match="no data"):
        on_every_process(alone, fails("no data"))


def test_what_one_process_cannot_is_said_by_all_with_its_place(monkeypatch):
    monkeypatch.setattr(main_process.socket, "gethostname", lambda: "node2")
    errors = exchanged(monkeypatch, lambda: 1, fails("no data"), fails("none", ConfigError))
    assert [type(error) for error in errors] == [DataError] * 3
    (line,) = set(map(str, errors))
    assert line.startswith("no data (only rank 1 on node2, rank 2 on node2 of 3 processes: ")


def test_what_no_process_can_is_said_as_it_is(monkeypatch):
    errors = exchanged(monkeypatch, fails("no data"), fails("no data"))
    assert list(map(str, errors)) == ["no data"] * 2


def test_what_one_process_has_otherwise_than_the_main_one_is_said_by_all(monkeypatch):
    known = [({"--dim": 8, "data": "a1"}, "node1"), ({"--dim": 8, "data": "b2"}, "node2")]

    def gather(everyone: list, mine, group) -> None:
        everyone[:] = known

    monkeypatch.setattr(main_process.torch.distributed, "all_gather_object", gather)
    engine = Engine(process(0), "DDP", None, cpu_group="group")
    for facts, _ in known:
        with pytest.raises(UsageError, match=r"^rank 1 on node2 has data b2 \(not a1\): start all"):
            require_the_same(engine, facts)
    known[1] = ({"engine": "DDP", "--dim": 8}, "node2")
    with pytest.raises(UsageError, match=r"has data None \(not a1\), engine DDP \(not None\): "):
        require_the_same(engine, known[0][0])
    known[1] = (known[0][0], "node2")
    require_the_same(engine, known[0][0])
    require_the_same(Engine(process(0, 1), "single process", None), {"--dim": 8})
