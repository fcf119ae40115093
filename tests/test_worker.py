"""With together=1, the worker generates one text at a time. Texts wait, are cancelled, and fail."""

from unittest.mock import Mock

import pytest
from conftest import VOCAB_SIZE, wait_for
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
def ask(worker, tokenizer):
    """Submits a text of n tokens and returns it; with `begun`, after its first token."""

    def ask(n: int = CONTEXT, begun: bool = False) -> StreamedText:
        text = StreamedText(
            prompt=PROMPT, max_new_tokens=n, sampling=GREEDY, tokenizer=tokenizer, deliver=Mock()
        )
        worker.submit(text)
        if begun:
            wait_for(lambda: text.ids)
        return text

    return ask


def test_a_text_cancelled_while_it_waits_is_never_read(worker, ask, decoder, monkeypatch):
    monkeypatch.setattr(decoder, "read", read := Mock(wraps=decoder.read))
    first, left = ask(begun=True), ask(3)
    left.end()
    last = ask(4)
    wait_for(lambda: worker._waiting == [last])
    n = len(first.ids)
    wait_for(lambda: len(first.ids) > n + 2)
    assert worker._running == [first]
    first.end()
    wait_for(lambda: last.finish_reason)
    assert left.ids == []
    assert [call.args for call in read.call_args_list] == [([PROMPT],)] * 2
    assert [last.ids] == generate(decoder, [PROMPT], 4, GREEDY)


@pytest.mark.parametrize("where", ["read", "step"])
def test_a_failure_ends_only_the_running_text(worker, ask, decoder, monkeypatch, capsys, where):
    with monkeypatch.context() as patch:
        patch.setattr(decoder, where, Mock(side_effect=RuntimeError("no memory left")))
        unlucky = ask()
        wait_for(lambda: unlucky.finish_reason)
    lucky = ask(4)
    wait_for(lambda: lucky.finish_reason)
    worker.close()
    assert unlucky.finish_reason == "error"
    assert [lucky.ids] == generate(decoder, [PROMPT], 4, GREEDY)
    assert "no memory left" in capsys.readouterr().err


def test_closing_ends_the_thread_and_all_texts_with_the_reason_closed(worker, ask):
    texts = [ask(begun=True), ask(3)]
    worker.close()
    texts.append(ask(3))  # too late
    assert not worker._thread.is_alive()
    for text in texts:
        text.deliver.assert_called_with("", "closed")
