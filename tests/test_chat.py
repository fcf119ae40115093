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
from inference.batch import Batch
from inference.chat import Chat, Conversation
from inference.decoder import Decoder
from inference.generation import generate
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


def length(tokenizer, *contents: str) -> int:
    return len(encode_chat_prompt(tokenizer, turns(*contents)))


def test_the_model_sees_all_that_was_said(tokenizer):
    talk = Conversation(tokenizer, context=500, reserve=9, system="Be brief.")
    system = Turn("system", "Be brief.")
    assert talk.ask("1 + 1") == (encode_chat_prompt(tokenizer, [system, *turns("1 + 1")]), 0)
    talk.answered("2")
    expected = [system, *turns("1 + 1", "2", "2 + 2")]
    assert talk.ask("2 + 2") == (encode_chat_prompt(tokenizer, expected), 0)


def test_a_question_without_an_answer_is_forgotten(tokenizer):
    talk = Conversation(tokenizer, context=500, reserve=9)
    talk.ask("1 + 1")
    talk.answered(" \n")
    assert talk.turns == []


def test_the_oldest_questions_and_answers_make_room_for_the_next(tokenizer):
    said = ("sum 1", "1", "sum 2", "2", "sum 3", "3")
    last = "sum 4"
    room = length(tokenizer, *said[4:], last)
    talk = Conversation(tokenizer, context=room + 9, reserve=9, turns=turns(*said))
    kept = turns(*said[4:], last)
    assert talk.ask(last) == (encode_chat_prompt(tokenizer, kept), 2)
    assert talk.turns == kept


def test_a_question_that_is_too_long_by_itself_is_refused_and_nothing_forgotten(tokenizer):
    talk = Conversation(tokenizer, context=60, reserve=9, turns=turns("sum 1", "1"))
    long = "1 + 1 = 2; " * 9
    n = length(tokenizer, long)
    with pytest.raises(UsageError, match=f"{n} tokens and the context of this model has 60, of wh"):
        talk.ask(long)
    assert talk.turns == turns("sum 1", "1")


@pytest.fixture
def converse(model, tokenizer, monkeypatch, capsys):
    """Types these lines, an exception in the place of one is raised there; returns the chat, its
    stdout and its stderr."""

    def typed(*lines, sampling=GREEDY, n=12, system=""):
        coming = iter([*lines, EOFError])

        def ask(prompt):
            print(prompt, end="")
            line = next(coming)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", ask)
        chat = Chat(
            decoder=Decoder(model),
            tokenizer=tokenizer,
            sampling=sampling,
            max_new_tokens=n,
            system=system,
        )
        chat.converse()
        return chat, *capsys.readouterr()

    return typed


def answers(out: str) -> list[str]:
    return [part.removesuffix("\n") for part in out.split("\n> ")[1:-1]]


def expected(model, tokenizer, said: list[Turn], n=12, sampling=GREEDY) -> str:
    ids = generate(
        model,
        [encode_chat_prompt(tokenizer, said)],
        n,
        sampling,
        stop_ids=(tokenizer.eos_id,),
        slide=False,
    )[0]
    return tokenizer.decode([*tokenizer.encode("x"), *ids])[1:]


def test_answers_follow_from_what_was_said_until_it_is_reset(converse, model, tokenizer):
    chat, out, err = converse("1 + 1", "", "2 + 2", "/reset", "2 + 2")
    first = expected(model, tokenizer, turns("1 + 1"))
    second = expected(model, tokenizer, turns("1 + 1", first, "2 + 2"))
    third = expected(model, tokenizer, turns("2 + 2"))
    assert second != third
    assert answers(out) == [first, "", second, "", third]
    assert "/reset" in err
    assert chat.conversation.turns == turns("2 + 2", third)


def test_every_answer_draws_anew(converse, model, tokenizer):
    wild = {"temperature": 2.0, "top_k": 0}
    _, out, _ = converse("1", "/reset", "1", sampling=Sampling(**wild, seed=7))
    first, _, second = answers(out)
    assert first == expected(model, tokenizer, turns("1"), sampling=Sampling(**wild, seed=7))
    assert second == expected(model, tokenizer, turns("1"), sampling=Sampling(**wild, seed=8))
    assert first != second


def test_the_system_message_stands_before_all(converse, model, tokenizer):
    _, out, _ = converse("1 + 1", system="sum")
    said = [Turn("system", "sum"), *turns("1 + 1")]
    assert answers(out) == [expected(model, tokenizer, said)]


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


def test_ctrl_c_at_the_prompt_tells_how_to_end(converse):
    _, out, err = converse(KeyboardInterrupt, "1 + 1")
    assert len(answers(out)[-1]) > 0
    assert "Ctrl-D ends" in err


def test_a_full_context_is_said(converse, tokenizer):
    chat, out, err = converse(*["sum 1 + 2 + 3 + 4"] * 6, n=30)
    assert err.count("is full: from here on the model does not see the oldest") >= 1
    assert len(answers(out)) == 6
    assert len(chat.conversation.turns) < 12
    _, _, err = converse("1 + 1 = 2; " * 30, "1")
    assert f"and the context of this model has {CONTEXT}, of which 12 are kept" in err
    _, out, err = converse("1", n=None)
    assert f"(The context of {CONTEXT} tokens is full: the answer ends here.)" in err
    ids = tokenizer.encode(answers(out)[0])
    assert len(ids) > CONTEXT // 2


def test_what_is_no_utf_8_is_one_clear_error(converse):
    with pytest.raises(UsageError, match="not valid UTF-8"):
        converse(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))


def test_an_answer_of_nothing_is_said_and_forgotten(converse, monkeypatch, tokenizer):
    monkeypatch.setattr(Batch, "step", lambda batch: batch.texts.pop().take(tokenizer.eos_id))
    chat, _, err = converse("1 + 1")
    assert "says nothing" in err
    assert chat.conversation.turns == []


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


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["auto", "--temperature", "-1"], "--temperature must be at least 0 and finite, not -1"),
        (["auto", "--max_new_tokens", "0"], "--max_new_tokens must be at least 1, not 0"),
        (["auto", "--greedy"], "unrecognized argument --greedy"),
    ],
)
def test_a_mistake_is_one_line(capsys, flags, error):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"chat: error: {error}")
    assert said.count("\n") == 1


def test_several_processes_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["auto"])
    assert "start it as python -m scripts.chat" in capsys.readouterr().err
