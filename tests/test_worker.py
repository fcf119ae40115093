"""With together=1, the worker generates one text at a time. Texts wait, are cancelled, and fail."""

import threading

import pytest
from conftest import SAFETY_NET_SECONDS, VOCAB_SIZE, wait_for
from small_model import opinionated

from lm.data.tokenizer_training import EOS_ID
from lm.inference.decoder import Decoder
from lm.inference.generation import StreamedText, generate
from lm.inference.sampling import Sampling
from lm.inference.server.worker import Worker

CONTEXT = 1 << 16  # so long that no text fills it
GREEDY = Sampling(temperature=0)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = opinionated(VOCAB_SIZE, CONTEXT)
    model.output.weight.data[EOS_ID] = 0  # never the likeliest
    return Decoder(model)


@pytest.fixture
def worker(decoder):
    made = Worker(decoder, together=1)
    yield made
    made.close()


@pytest.fixture
def ask(tokenizer):
    """Makes a text whose event `begun` is set at its first piece, and `ended` at its end."""

    def make(n: int = CONTEXT) -> StreamedText:
        def deliver(piece: str, finish_reason: str | None) -> None:
            text.begun.set()
            if finish_reason:
                text.ended.set()

        text = StreamedText(
            prompt=PROMPT, max_new_tokens=n, sampling=GREEDY, tokenizer=tokenizer, deliver=deliver
        )
        text.begun, text.ended = threading.Event(), threading.Event()
        return text

    return make


def happens(event: threading.Event) -> bool:
    return event.wait(SAFETY_NET_SECONDS)


def test_a_text_cancelled_while_it_waits_is_never_read(worker, ask, decoder, monkeypatch):
    read, really = [], decoder.read
    monkeypatch.setattr(decoder, "read", lambda new: read.append(new) or really(new))
    first, left, last = ask(), ask(3), ask(4)
    worker.submit(first)
    assert happens(first.begun)
    worker.submit(left)
    left.cancel()
    worker.submit(last)
    assert worker._waiting == [last]
    n = len(first.ids)
    wait_for(lambda: len(first.ids) > n + 2)
    assert worker._running == [first]
    first.cancel()
    assert happens(last.ended)
    assert left.ids == []
    assert read == [[PROMPT]] * 2
    assert [last.ids] == generate(decoder, [PROMPT], 4, GREEDY)


@pytest.mark.parametrize("where", ["read", "step"])
def test_a_failure_ends_only_the_running_text(worker, ask, decoder, monkeypatch, capsys, where):
    works = getattr(decoder, where)

    def fail(*_):
        monkeypatch.setattr(decoder, where, works)
        raise RuntimeError("no memory left")

    monkeypatch.setattr(decoder, where, fail)
    unlucky, lucky = ask(), ask(4)
    worker.submit(unlucky)
    assert happens(unlucky.ended)
    assert unlucky.finish_reason == "error"
    worker.submit(lucky)
    assert happens(lucky.ended)
    worker.close()
    assert [lucky.ids] == generate(decoder, [PROMPT], 4, GREEDY)
    assert "no memory left" in capsys.readouterr().err


def test_closing_ends_the_thread_and_all_texts_with_the_reason_closed(worker, ask, decoder):
    running, waiting, late = ask(), ask(3), ask(3)
    worker.submit(running)
    assert happens(running.begun)
    worker.submit(waiting)
    worker.close()
    worker.submit(late)
    assert not worker._thread.is_alive()
    for text in (running, waiting, late):
        assert text.ended.is_set()
        assert text.finish_reason == "closed"
