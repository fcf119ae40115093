"""A conversation in the terminal: what it remembers, streams, says, and how it is ended."""

import io
from pathlib import Path

import pytest
from small_model import opinionated

from common.errors import UsageError
from data.chat_template import TEMPLATE_FILE, encode_chat_prompt
from data.conversations import Turn
from data.tokenizer import Tokenizer
from formats.portable import save_portable
from inference.chat import Chat
from inference.decoder import Decoder
from inference.generation import Batch, generate
from inference.sampling import Sampling
from scripts.chat import main
from tests.conftest import VOCAB_SIZE

CONTEXT = 96
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def tokenizer(packed):
    return Tokenizer(packed / "tokenizer.model")


@pytest.fixture(scope="module")
def model():
    return opinionated(VOCAB_SIZE, CONTEXT)


def turns(*contents: str) -> list[Turn]:
    """A user's and an assistant's in turns."""
    return [Turn(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]


@pytest.fixture
def chat(model, tokenizer):
    def make(**settings) -> Chat:
        defaults = {"sampling": GREEDY, "max_new_tokens": 12, "system": ""}
        return Chat(decoder=Decoder(model), tokenizer=tokenizer, **defaults | settings)

    return make


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_oldest_questions_and_answers_make_room_for_the_next(chat, tokenizer, system, capsys):
    talk, before = chat(system=system), [Turn("system", system)] if system else []
    said = turns("sum 1", "1", "sum 2", "2", "sum 3", "3")
    kept = encode_chat_prompt(tokenizer, [*before, *said[4:], Turn("user", "sum 4")])
    talk.context = len(kept) + 12
    talk.turns = said
    assert talk.ask("sum 4") == kept
    assert talk.turns == turns("sum 3", "3", "sum 4")
    assert f"context of {talk.context} tokens is full" in capsys.readouterr().err
    talk.turns = turns("sum 3", "3")
    long = "1 + 1 = 2; " * 9
    n = len(encode_chat_prompt(tokenizer, [*before, Turn("user", long)]))
    with pytest.raises(UsageError, match=f"{n} tokens .*context of this model has .*, of which 12"):
        talk.ask(long)
    assert talk.turns == turns("sum 3", "3")


@pytest.fixture
def converse(chat, monkeypatch, capsys):
    """Types these lines, an exception in the place of one is raised there; returns the chat, its
    stdout and its stderr."""

    def typed(*lines, **settings):
        coming = iter([*lines, EOFError])

        def ask(prompt):
            print(prompt, end="")
            line = next(coming)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", ask)
        talk = chat(**settings)
        talk.converse()
        return talk, *capsys.readouterr()

    return typed


def answers(out: str) -> list[str]:
    return [part.removesuffix("\n") for part in out.split("\n> ")[1:-1]]


def expected(model, tokenizer, said: list[Turn], sampling=GREEDY) -> str:
    prompt = encode_chat_prompt(tokenizer, said)
    (ids,) = generate(model, [prompt], 12, sampling, stop_ids=(tokenizer.eos_id,))
    return tokenizer.decode([*tokenizer.encode("x"), *ids])[1:]


def test_answers_follow_from_what_was_said_until_it_is_reset(converse, model, tokenizer):
    talk, out, err = converse("1 + 1", "", "2 + 2", "/reset", KeyboardInterrupt, "2 + 2")
    first = expected(model, tokenizer, turns("1 + 1"))
    second = expected(model, tokenizer, turns("1 + 1", first, "2 + 2"))
    third = expected(model, tokenizer, turns("2 + 2"))
    assert second != third
    assert answers(out) == [first, "", second, "", "", third]
    assert "Forgotten." in err
    assert "Ctrl-D ends the program" in err
    assert talk.turns == turns("2 + 2", third)


def test_every_answer_draws_anew(converse, model, tokenizer):
    wild = {"temperature": 2.0, "top_k": 0}
    _, out, _ = converse("1", "/reset", "1", sampling=Sampling(**wild, seed=7))
    first, _, second = answers(out)
    assert first == expected(model, tokenizer, turns("1"), Sampling(**wild, seed=7))
    assert second == expected(model, tokenizer, turns("1"), Sampling(**wild, seed=8))
    assert first != second


def test_ctrl_c_ends_the_answer_alone_and_what_was_said_of_it_stays(
    converse, model, tokenizer, monkeypatch
):
    steps, step = [], Batch.step

    def interrupted(batch):
        steps.append(batch)
        if len(steps) == 5:
            raise KeyboardInterrupt
        step(batch)

    monkeypatch.setattr(Batch, "step", interrupted)
    _, out, err = converse("1 + 1", "2 + 2")
    whole = expected(model, tokenizer, turns("1 + 1"))
    begun, second = answers(out)
    assert begun
    assert whole.startswith(begun)
    assert len(begun) < len(whole)
    assert "(Stopped.)" in err
    assert second == expected(model, tokenizer, turns("1 + 1", begun, "2 + 2"))


def test_an_answer_that_fills_the_context_or_is_empty_is_said(converse, tokenizer, monkeypatch):
    _, out, err = converse("1", max_new_tokens=None)
    assert f"(The context of {CONTEXT} tokens is full: the answer ends here.)" in err
    assert len(tokenizer.encode(answers(out)[0])) > CONTEXT // 2
    _, _, err = converse("1")
    assert "is full" not in err
    monkeypatch.setattr(Batch, "step", lambda batch: batch.texts.pop().take(tokenizer.eos_id))
    talk, _, err = converse("1 + 1")
    assert "says nothing" in err
    assert talk.turns == []


def test_what_is_no_utf_8_is_one_clear_error(converse):
    with pytest.raises(UsageError, match="not valid UTF-8"):
        converse(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))


@pytest.mark.parametrize("fine_tuned", [False, True])
def test_the_program_answers_what_comes_by_a_pipe(
    tmp_path, model, tokenizer, monkeypatch, capsys, fine_tuned
):
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    save_portable(tmp_path, model.config, tensors)
    (tmp_path / "tokenizer.model").write_bytes(Path(tokenizer.path).read_bytes())
    if fine_tuned:
        (tmp_path / TEMPLATE_FILE).touch()
    monkeypatch.setattr("sys.stdin", io.StringIO("1 + 1\n"))
    flags = ("--temperature", "0", "--max_new_tokens", "12", "--system", "sum", "--device", "cpu")
    main([str(tmp_path), *flags])
    said = [Turn("system", "sum"), *turns("1 + 1")]
    out, err = capsys.readouterr()
    assert answers(out) == [expected(model, tokenizer, said)]
    assert ("have learned from no conversations" in err) == (not fine_tuned)
