from types import SimpleNamespace

import pytest

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


SINGLE = Engine(SimpleNamespace(is_main_process=True, num_processes=1), "single process", None)


def never():
    raise AssertionError("called on a process other than the main process")


def test_the_main_process_decides_for_all(monkeypatch):
    sent_by_main = []
    engine = engine_with_answers(monkeypatch, None, None)
    monkeypatch.setattr(
        agreement, "_gather", lambda engine, mine: sent_by_main.append(mine) or [(mine, "a")]
    )
    assert on_main_process(engine, lambda: ("an", "answer")) == ("an", "answer")
    second = engine_with_answers(monkeypatch, *sent_by_main, None, rank=1)
    assert on_main_process(second, never) == ("an", "answer")
    with pytest.raises(UsageError, match="the reason"):
        on_main_process(
            engine_with_answers(monkeypatch, (None, UsageError("the reason")), None, rank=1), never
        )


def fails(words: str, kind=UsageError):
    def attempt():
        raise kind(words)

    return attempt


def test_a_single_process_raises_its_own_error():
    for ask in (on_main_process, on_every_process):
        assert ask(SINGLE, lambda: 1) == 1
        with pytest.raises(UsageError, match="no data"):
            ask(SINGLE, fails("no data"))


@pytest.mark.parametrize("attempt", [lambda: 1, fails("no data")])
def test_an_error_on_some_processes_is_raised_on_all_and_names_rank_and_host(monkeypatch, attempt):
    engine = engine_with_answers(monkeypatch, None, UsageError("no data"), ConfigError("none"))
    said = r"^no data \(of 3 processes only rank 1 on node1, rank 2 on node2: "
    with pytest.raises(UsageError, match=said):
        on_every_process(engine, attempt)


def test_an_error_on_all_processes_is_raised_unchanged(monkeypatch):
    engine = engine_with_answers(monkeypatch, UsageError("no data"), UsageError("no data"))
    with pytest.raises(UsageError, match=r"^no data$"):
        on_every_process(engine, fails("no data"))


def test_a_difference_from_the_main_process_is_an_error_on_all(monkeypatch):
    main, other = {"--dim": 8, "data": "a1"}, {"--dim": 8, "data": "b2"}
    with pytest.raises(UsageError, match=r"^rank 1 on node1 has data b2 \(not a1\): start all"):
        require_the_same(engine_with_answers(monkeypatch, main, other), other)
    other = {"engine": "DDP", "--dim": 8}
    with pytest.raises(UsageError, match=r"has data None \(not a1\), engine DDP \(not None\): "):
        require_the_same(engine_with_answers(monkeypatch, main, other), main)
    require_the_same(engine_with_answers(monkeypatch, main, main), main)
    require_the_same(SINGLE, main)
