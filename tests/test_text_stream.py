import random

import pytest
import sentencepiece

from data.tokenizer import Tokenizer
from inference.text_stream import TextStream
from tests.conftest import write_corpus

TEXTS = [
    "sum 3: 1 + 2 = 3;\n",
    "床前明月光，疑是地上霜。\n",
    "emoji 🤗👩‍👩‍👧 and é, tabs\t\tand  spaces ",
    "\u2581 literal, \x00 control, \r\n",
    " leading",
]


@pytest.fixture(scope="module")
def tokenizer(packed) -> Tokenizer:
    return Tokenizer(packed / "tokenizer.model")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Tokenizer:
    """One that writes a space before every text and drops it when decoding, as Llama's does."""
    folder = tmp_path_factory.mktemp("foreign")
    corpus = write_corpus(folder / "sums.jsonl")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "t"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        minloglevel=2,
    )
    return Tokenizer(folder / "t.model")


def streamed(tokenizer: Tokenizer, ids: list[int], stop=()) -> list[str]:
    stream = TextStream(tokenizer, stop)
    parts = []
    for id in ids:
        parts.append(stream.add(id))
        if stream.stopped:
            break
    return [*parts, stream.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_parts_together_are_the_text(tokenizer, text):
    parts = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text


@pytest.mark.parametrize("text", TEXTS)
def test_an_id_that_only_the_model_has_room_for_is_nothing(tokenizer, text):
    """As where a vocabulary was rounded up."""
    first, *ids = tokenizer.encode(text)
    beyond = [first, tokenizer.vocab_size, tokenizer.vocab_size + 7, *ids, tokenizer.vocab_size]
    assert tokenizer.decode(beyond) == text
    assert "".join(streamed(tokenizer, beyond)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_no_part_holds_a_broken_character(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) > len(text) or text.isascii()  # characters are split into bytes
    assert not any("\ufffd" in part for part in streamed(tokenizer, ids))


def test_a_character_comes_with_its_last_byte(tokenizer):
    ids = tokenizer.encode("🤗!")
    assert len(ids) == 5
    assert streamed(tokenizer, ids) == ["", "", "", "🤗", "!", ""]


@pytest.mark.parametrize("which", ["tokenizer", "foreign"])
def test_random_ids_give_what_decoding_all_of_them_gives(which, request):
    tokenizer = request.getfixturevalue(which)
    draw = random.Random(0)
    for _ in range(300):
        prompt = [1, *(draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(4)))]
        prompt += tokenizer.encode("x")  # whole characters, as in a text that was encoded
        ids = [draw.randrange(3, tokenizer.vocab_size) for _ in range(30)]
        ids += [draw.randrange(3, 259) for _ in range(20)]  # bytes, mostly no valid characters
        whole = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
        assert "".join(streamed(tokenizer, ids)) == whole


def test_bytes_that_never_become_a_character_are_given_at_the_end(tokenizer):
    ids = tokenizer.encode("🤗")[:2]
    assert streamed(tokenizer, ids) == ["", "", tokenizer.decode(ids)]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((";",), "sum 3: 1 + 2 = 3"),
        (("= 3;",), "sum 3: 1 + 2 "),
        (("2 = 4", "3;"), "sum 3: 1 + 2 = "),
        (("nothing of it",), "sum 3: 1 + 2 = 3;\n"),
        (("sum",), ""),
        (("",), "sum 3: 1 + 2 = 3;\n"),
        ((" = 3", " + "), "sum 3: 1"),
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_given(tokenizer, stop, expected):
    ids = tokenizer.encode(TEXTS[0])
    parts = streamed(tokenizer, ids, stop)
    assert "".join(parts) == expected


def test_what_may_become_a_stop_string_is_held_back_and_given_when_it_does_not(tokenizer):
    stream = TextStream(tokenizer, ("ab!",))
    parts = [stream.add(id) for text in ("a", "b", "c") for id in tokenizer.encode(text)]
    assert parts == ["", "", "abc"]
    assert stream.end() == ""


def test_what_the_prompt_has_shown_already_is_not_given_again_and_is_no_stop_string(tokenizer):
    stream = TextStream(tokenizer, (" 3",), shown=" ")
    parts = [stream.add(id) for text in (" 3", ": 1", " 3") for id in tokenizer.encode(text)]
    assert "".join(parts) == "3: 1"
    assert stream.stopped
