from types import SimpleNamespace

import pytest

from common.errors import UsageError
from data.errors import DataError
from model import ConfigError
from training.engine import main_process
from training.engine.main_process import on_main_process


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
    assert on_main_process(process(0), lambda: ("an", "answer")) == ("an", "answer")
    assert on_main_process(process(1), never) == ("an", "answer")


def test_a_process_that_is_alone_asks_nobody(broadcast):
    assert on_main_process(process(0, processes=1), lambda: None) is None
    assert broadcast == []


@pytest.mark.parametrize("error", [UsageError, ConfigError, DataError])
def test_a_mistake_is_raised_on_all(broadcast, error):
    def decide():
        raise error("the reason")

    for rank in (0, 1):
        with pytest.raises(error, match="the reason"):
            on_main_process(process(rank), decide if rank == 0 else never)


def test_anything_else_is_an_error_where_it_happened(broadcast):
    with pytest.raises(ZeroDivisionError):
        on_main_process(process(0), lambda: 1 / 0)
