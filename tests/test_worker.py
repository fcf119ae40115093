"""Several ask at once, one thread writes: who joins, waits, leaves, and what fails."""

import threading

import pytest
from conftest import SAFETY_NET_SECONDS, VOCAB_SIZE
from small_model import opinionated

from data.tokenizer import Tokenizer
from data.tokenizer_training import EOS_ID
from inference.batch import STRETCH
from inference.continuation import Continuation
from inference.decoder import Decoder
from inference.generation import generate
from inference.sampling import Sampling
from inference.worker import BusyError, Worker

CONTEXT = 1 << 16  # so long that no text comes to its end by itself
GREEDY = Sampling(temperature=0)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def decoder():
    model = opinionated(VOCAB_SIZE, CONTEXT)
    model.output.weight.data[EOS_ID] = 0  # never the likeliest
    return Decoder(model)


class Client:
    """Waits for a text."""

    def __init__(self, tokenizer: Tokenizer, n: int | None = None):
        self.pieces: list[str] = []
        self.begun, self.ended = threading.Event(), threading.Event()
        options = {"deliver": self.take, "max_new_tokens": n}
        self.text = Continuation(tokenizer, PROMPT, GREEDY, CONTEXT, **options)

    def take(self, piece: str, finish_reason: str | None) -> None:
        self.pieces.append(piece)
        self.begun.set()
        if finish_reason:
            self.ended.set()


@pytest.fixture
def worker(decoder):
    """Makes one, which is closed in the end."""
    made = []

    def make(**limits) -> Worker:
        made.append(Worker(decoder, **{"together": 4, "waiting": 4} | limits))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def client(packed):
    tokenizer = Tokenizer(packed / "tokenizer.model")
    return lambda n=None: Client(tokenizer, n)


def happens(event: threading.Event) -> bool:
    return event.wait(SAFETY_NET_SECONDS)


def expected(decoder: Decoder, client: Client, n: int) -> str:
    tokenizer = Tokenizer(client.text.tokenizer.path)
    (ids,) = generate(decoder, [PROMPT], n, GREEDY)
    return tokenizer.decode([*tokenizer.encode("x"), *ids])[1:]


def test_a_short_text_does_not_wait_for_a_long_one(worker, client, decoder):
    writer, long, short = worker(), client(), client(5)
    writer.submit(long.text)
    assert happens(long.begun)
    writer.submit(short.text)
    assert happens(short.ended)
    assert long.text.finish_reason is None
    assert writer.load == {"running": 1, "waiting": 0}
    writer.close()
    assert "".join(short.pieces) == expected(decoder, short, 5)


def test_who_does_not_fit_waits_and_whoever_comes_then_is_refused(worker, client):
    writer, first, second, third = worker(together=1, waiting=1), client(), client(3), client(3)
    writer.submit(first.text)
    assert happens(first.begun)
    writer.submit(second.text)
    assert writer.load == {"running": 1, "waiting": 1}
    with pytest.raises(BusyError, match="too many requests"):
        writer.submit(third.text)
    assert not second.begun.is_set()
    first.text.cancel()
    assert happens(second.ended)
    assert second.text.finish_reason == "length"


def test_whose_prompt_is_being_read_has_left_the_queue_and_counts_as_running(
    worker, client, decoder, monkeypatch
):
    reads, go_on = threading.Event(), threading.Event()

    def join(prompts, capacity):
        monkeypatch.undo()
        reads.set()
        assert happens(go_on)
        return decoder.join(prompts, capacity)

    monkeypatch.setattr(decoder, "join", join)
    writer, first, second, third = worker(together=1, waiting=1), client(3), client(3), client(3)
    writer.submit(first.text)
    try:
        assert happens(reads)
        assert writer.load == {"running": 1, "waiting": 0}
        writer.submit(second.text)
        with pytest.raises(BusyError, match="too many requests"):
            writer.submit(third.text)
    finally:
        go_on.set()
    assert happens(second.ended)
    assert second.text.finish_reason == "length"


def test_who_leaves_while_waiting_costs_nothing(worker, client, decoder, monkeypatch):
    read, join = [], decoder.join
    monkeypatch.setattr(decoder, "join", lambda prompts, n: read.append(n) or join(prompts, n))
    writer, first, left, last = worker(together=1, waiting=1), client(), client(3), client(4)
    writer.submit(first.text)
    assert happens(first.begun)
    writer.submit(left.text)
    left.text.cancel()
    assert writer.load == {"running": 1, "waiting": 0}
    writer.submit(last.text)  # in the place of the one that has left
    first.text.cancel()
    assert happens(last.ended)
    assert left.pieces == []
    assert read == [len(PROMPT) + STRETCH, len(PROMPT) + 4]


def test_a_failure_is_told_to_those_it_concerns_and_others_can_come(
    worker, client, decoder, monkeypatch, capsys
):
    def fail(tokens):
        monkeypatch.undo()
        raise RuntimeError("no memory left")

    monkeypatch.setattr(decoder, "step", fail)
    writer, unlucky, lucky = worker(), client(), client(4)
    writer.submit(unlucky.text)
    assert happens(unlucky.ended)
    assert unlucky.text.finish_reason == "error"
    writer.submit(lucky.text)
    assert happens(lucky.ended)
    writer.close()
    assert "".join(lucky.pieces) == expected(decoder, lucky, 4)
    assert "no memory left" in capsys.readouterr().err


def test_closing_ends_the_thread_and_tells_all(worker, client):
    writer, running, waiting = worker(together=1), client(), client(3)
    writer.submit(running.text)
    assert happens(running.begun)
    writer.submit(waiting.text)
    writer.close()
    assert running.ended.is_set()
    assert waiting.ended.is_set()
    assert running.text.finish_reason == waiting.text.finish_reason == "error"
    with pytest.raises(BusyError, match="is being stopped"):
        writer.submit(client(3).text)


def test_closing_wakes_a_worker_that_has_nothing_to_do(worker):
    writer = worker()
    writer.close()
    assert not writer._thread.is_alive()
