"""Several ask at once, one thread writes: who joins, waits, leaves, and what fails."""

import threading

import pytest
from conftest import SAFETY_NET_SECONDS, VOCAB_SIZE
from small_model import opinionated

from data.tokenizer import Tokenizer
from data.tokenizer_training import EOS_ID
from inference.decoder import Decoder
from inference.generation import generate
from inference.sampling import Sampling
from inference.text_stream import StreamedText
from inference.worker import BusyError, Worker

CONTEXT = 1 << 16  # so long that no text comes to its end by itself
GREEDY = Sampling(temperature=0)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = opinionated(VOCAB_SIZE, CONTEXT)
    model.output.weight.data[EOS_ID] = 0  # never the likeliest
    return Decoder(model)


class Asked(StreamedText):
    """A text with events at its first piece and at its end."""

    def __init__(self, tokenizer: Tokenizer, n: int = CONTEXT):
        self.begun, self.ended = threading.Event(), threading.Event()
        super().__init__(
            prompt=PROMPT,
            max_new_tokens=n,
            sampling=GREEDY,
            tokenizer=tokenizer,
            deliver=self.note,
        )

    def note(self, piece: str, finish_reason: str | None) -> None:
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
def ask(packed):
    tokenizer = Tokenizer(packed / "tokenizer.model")
    return lambda *n: Asked(tokenizer, *n)


def happens(event: threading.Event) -> bool:
    return event.wait(SAFETY_NET_SECONDS)


def test_a_short_text_does_not_wait_for_a_long_one(worker, ask, decoder):
    writer, long, short = worker(), ask(), ask(5)
    writer.submit(long)
    assert happens(long.begun)
    writer.submit(short)
    assert happens(short.ended)
    assert long.finish_reason is None
    assert writer.load == {"running": 1, "waiting": 0}
    writer.close()
    assert [short.ids] == generate(decoder, [PROMPT], 5, GREEDY)


def test_a_text_whose_prompt_is_being_read_counts_as_running(worker, ask, decoder, monkeypatch):
    reads, go_on = threading.Event(), threading.Event()

    def join(prompts, capacity):
        monkeypatch.undo()
        reads.set()
        assert happens(go_on)
        return decoder.join(prompts, capacity)

    monkeypatch.setattr(decoder, "join", join)
    writer, first, second = worker(together=1, waiting=1), ask(3), ask(3)
    writer.submit(first)
    try:
        assert happens(reads)
        assert writer.load == {"running": 1, "waiting": 0}
        writer.submit(second)
        with pytest.raises(BusyError, match="too many requests"):
            writer.submit(ask(3))
    finally:
        go_on.set()
    assert happens(second.ended)
    assert second.finish_reason == "length"


def test_a_text_that_leaves_while_it_waits_costs_nothing(worker, ask, decoder, monkeypatch):
    read, join = [], decoder.join
    monkeypatch.setattr(
        decoder, "join", lambda prompts, n: read.append(prompts) or join(prompts, n)
    )
    writer, first, left, last = worker(together=1, waiting=1), ask(), ask(3), ask(4)
    writer.submit(first)
    assert happens(first.begun)
    writer.submit(left)
    assert writer.load == {"running": 1, "waiting": 1}
    left.cancel()
    assert writer.load == {"running": 1, "waiting": 0}
    writer.submit(last)  # in the place of the one that has left
    assert not last.begun.is_set()
    first.cancel()
    assert happens(last.ended)
    assert left.ids == []
    assert read == [[PROMPT]] * 2


def test_a_failure_is_told_to_those_it_concerns_and_others_can_come(
    worker, ask, decoder, monkeypatch, capsys
):
    def fail(tokens):
        monkeypatch.undo()
        raise RuntimeError("no memory left")

    monkeypatch.setattr(decoder, "step", fail)
    writer, unlucky, lucky = worker(), ask(), ask(4)
    writer.submit(unlucky)
    assert happens(unlucky.ended)
    assert unlucky.finish_reason == "error"
    writer.submit(lucky)
    assert happens(lucky.ended)
    writer.close()
    assert [lucky.ids] == generate(decoder, [PROMPT], 4, GREEDY)
    assert "no memory left" in capsys.readouterr().err


def test_closing_ends_the_thread_and_tells_all(worker, ask):
    idle = worker()
    idle.close()
    assert not idle._thread.is_alive()
    writer, running, waiting = worker(together=1), ask(), ask(3)
    writer.submit(running)
    assert happens(running.begun)
    writer.submit(waiting)
    writer.close()
    assert running.ended.is_set()
    assert waiting.ended.is_set()
    assert running.finish_reason == waiting.finish_reason == "error"
    with pytest.raises(BusyError, match="is being stopped"):
        writer.submit(ask(3))
