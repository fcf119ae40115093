"""A conversation in the terminal: the turns that the model sees, its answers and the notes."""

import io
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from conftest import VOCAB_SIZE
from small_model import opinionated, save_model

from lm.common.errors import UsageError
from lm.data.chat_template import TEMPLATE_FILE, encode_chat_prompt
from lm.data.conversations import Turn
from lm.inference import prompts
from lm.inference.decoder import Decoder
from lm.inference.generation import Batch, generate
from lm.inference.sampling import Sampling
from lm.inference.terminal import Chat
from scripts.chat import main

CONTEXT = 192
GREEDY = Sampling(temperature=0)
WILD = Sampling(temperature=2.0, top_k=0, seed=7)
BRIEF = Turn("system", "Be brief.")


@pytest.fixture(scope="module")
def model():
    return opinionated(VOCAB_SIZE, CONTEXT)


def turns(*contents: str) -> list[Turn]:
    """Return turns with these contents, of the user and the assistant alternately."""
    return [Turn(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]


@pytest.fixture
def chat(model, tokenizer):
    settings = {"sampling": GREEDY, "max_new_tokens": 12, "system": BRIEF.content}
    return Chat(decoder=Decoder(model), tokenizer=tokenizer, **settings)


@pytest.mark.parametrize("n_fitting", [3, 4])  # of 4 only 3 stay: no answer without its question
def test_the_oldest_turns_are_dropped_when_the_context_is_full(chat, tokenizer, capsys, n_fitting):
    said, question = turns("sum 1", "1", "sum 2", "2", "sum 3", "3"), Turn("user", "sum 4")
    fitting = encode_chat_prompt(tokenizer, [BRIEF, *[*said, question][-n_fitting:]])
    chat.context, chat.turns = len(fitting) + 12, said
    assert chat.ask("sum 4") == encode_chat_prompt(tokenizer, [BRIEF, *said[4:], question])
    assert chat.turns == turns("sum 3", "3", "sum 4")
    assert "now forgets the oldest 4 messages" in capsys.readouterr().err
    chat.turns, long = said, "1 + 1 = 2; " * 9
    n = len(encode_chat_prompt(tokenizer, [BRIEF, Turn("user", long)]))
    with pytest.raises(UsageError, match=f"{n} tokens.*the model's context has .*, and 12 are"):
        chat.ask(long)
    assert chat.turns == said


@pytest.fixture
def converse(chat, monkeypatch, capsys):
    """Types the given lines; if a line is an exception, raises it. Returns the answers and the
    text of stderr."""

    def converse(*lines) -> tuple[list[str], str]:
        typed = Mock(side_effect=[*lines, EOFError])
        monkeypatch.setattr("builtins.input", lambda prompt: print(prompt, end="") or typed())
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        prompts.converse(chat.answer)
        out, err = capsys.readouterr()
        answers = [part.removesuffix("\n") for part in out.split("\n> ")[1:-1]]
        return answers, err

    return converse


def expected(model, tokenizer, said: list[Turn], sampling=GREEDY) -> str:
    prompt = encode_chat_prompt(tokenizer, [BRIEF, *said])
    (ids,) = generate(model, [prompt], 12, sampling, stop_ids=(tokenizer.eos_id,))
    return tokenizer.decode([*tokenizer.encode("x"), *ids])[1:]


def test_an_answer_depends_on_the_earlier_turns_until_reset(chat, converse, model, tokenizer):
    chat.sampling = WILD
    found, err = converse("1 + 1", "", "2 + 2", "/reset", KeyboardInterrupt, "2 + 2")
    first = expected(model, tokenizer, turns("1 + 1"), WILD)
    second = expected(model, tokenizer, turns("1 + 1", first, "2 + 2"), WILD.numbered(1))
    third = expected(model, tokenizer, turns("2 + 2"), WILD.numbered(2))
    assert found == [first, "", second, "", "", third]
    assert "This is a new chat." in err
    assert "Ctrl-D ends the program" in err
    assert chat.turns == turns("2 + 2", third)


def test_ctrl_c_ends_only_the_answer_whose_beginning_stays(converse, model, tokenizer, monkeypatch):
    steps, step = [], Batch.step

    def interrupted(batch):
        steps.append(batch)
        if len(steps) == 5:
            raise KeyboardInterrupt
        step(batch)

    monkeypatch.setattr(Batch, "step", interrupted)
    (begun, second), _ = converse("1 + 1", "2 + 2")
    whole = expected(model, tokenizer, turns("1 + 1"))
    assert begun
    assert whole.startswith(begun)
    assert len(begun) < len(whole)
    assert second == expected(model, tokenizer, turns("1 + 1", begun, "2 + 2"))


def test_a_note_says_why_an_answer_is_cut_or_empty(chat, converse, tokenizer, monkeypatch):
    assert "is full" not in converse("1")[1]
    chat.max_new_tokens = None
    (_, answer), err = converse("/reset", "1")
    assert "(The context is full: the answer ends here.)" in err
    assert len(tokenizer.encode(answer)) > CONTEXT // 2
    monkeypatch.setattr(Batch, "step", lambda batch: batch.texts.pop().take(tokenizer.eos_id))
    assert "The answer is empty" in converse("/reset", "1 + 1")[1]
    assert chat.turns == []


@pytest.mark.parametrize("fine_tuned", [False, True])
def test_the_program_answers_questions_from_a_pipe(
    tmp_path, model, tokenizer, monkeypatch, capsys, fine_tuned
):
    save_model(tmp_path, model, tokenizer.path)
    if fine_tuned:
        (tmp_path / TEMPLATE_FILE).touch()
    flags = ["--temperature", "0", "--max_new_tokens", "12", "--device", "cpu", "--system"]
    answer = expected(model, tokenizer, turns("1 + 1")) + "\n"
    errors_by_last_line = {"": None, "\udcff": "not valid UTF-8", "1" * 999: "shorten the prompt"}
    for last, why in errors_by_last_line.items():
        raw = io.BytesIO(f"1 + 1\n{last}\n".encode(errors="surrogateescape"))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(raw, "utf-8"))
        with pytest.raises(SystemExit, match="2") if why else nullcontext():
            main([str(tmp_path), *flags, BRIEF.content])
        out, err = capsys.readouterr()
        assert out == answer
        assert (why or "") in err
        assert ("was not trained on conversations" in err) == (not fine_tuned)
