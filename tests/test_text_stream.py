"""Ids become whole characters, up to a stop string."""

import random

import pytest
import sentencepiece

from data.tokenizer import Tokenizer
from inference.sampling import Sampling
from inference.text_stream import StreamedText, TextStream
from tests.conftest import write_corpus

TEXTS = [
    "sum 3: 1 + 2 = 3;\n",
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
def test_the_parts_are_whole_characters_and_together_the_text(tokenizer, text):
    first, *ids = tokenizer.encode(text)
    beyond = [first, tokenizer.vocab_size + 7, *ids, tokenizer.vocab_size]  # a rounded vocabulary
    for parts in (streamed(tokenizer, [first, *ids]), streamed(tokenizer, beyond)):
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


def test_a_character_comes_with_its_last_byte_and_a_broken_one_at_the_end(tokenizer):
    ids = tokenizer.encode("🤗!")
    assert streamed(tokenizer, ids) == ["", "", "", "🤗", "!", ""]
    assert streamed(tokenizer, ids[:2]) == ["", "", tokenizer.decode(ids[:2])]


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


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((";",), "sum 3: 1 + 2 = 3"),
        (("2 = 4", "3;"), "sum 3: 1 + 2 = "),
        (("nothing of it", ""), "sum 3: 1 + 2 = 3;\n"),
        (("sum",), ""),
        ((" = 3", " + "), "sum 3: 1"),
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_given(tokenizer, stop, expected):
    assert "".join(streamed(tokenizer, tokenizer.encode(TEXTS[0]), stop)) == expected


def test_the_beginning_of_a_stop_string_is_held_back_and_given_when_the_rest_does_not_come(
    tokenizer,
):
    stream = TextStream(tokenizer, ("ab!",))
    parts = [stream.add(id) for text in ("a", "b", "c") for id in tokenizer.encode(text)]
    assert [*parts, stream.end()] == ["", "", "abc", ""]


def test_a_text_ends_with_its_length_the_end_piece_or_a_stop_string(tokenizer):
    ids = tokenizer.encode("1 + 2 = 3; 2 + 2 = 4;")

    def written(tokens: list[int], most: int, **options) -> tuple[str, str | None, int]:
        delivered = []
        text = StreamedText(
            prompt=[5],
            max_new_tokens=most,
            sampling=Sampling(),
            tokenizer=tokenizer,
            deliver=lambda *piece: delivered.append(piece),
            **options,
        )
        for token in tokens:
            text.take(token)
        text.cancel()
        reasons = [reason for _, reason in delivered]
        assert "".join(piece for piece, _ in delivered) == text.text
        assert reasons.count(None) == len(reasons) - (text.finish_reason != "cancelled")
        return text.text, text.finish_reason, text.n_tokens

    eos, whole = tokenizer.eos_id, tokenizer.decode(ids)
    assert written(ids, len(ids)) == (whole, "length", len(ids))
    assert written(ids, len(ids) + 1) == (whole, "cancelled", len(ids))
    assert written(ids, 4) == (tokenizer.decode(ids[:4]), "length", 4)
    assert written([*ids[:3], eos, *ids], 4) == (tokenizer.decode(ids[:3]), "stop", 4)
    assert written(ids, 99, stop=("= 3;",))[:2] == ("1 + 2 ", "stop")
    held = tokenizer.encode("2 = 3; ")
    assert written(held, 99, stop=("3; x",))[0] == "2 = "
    assert written([*held, eos], 99, stop=("3; x",))[0] == "2 = 3; "
    # The first token begins with the space that ends the prompt.
    spaced = tokenizer.encode(" 3: 1 3")
    given = written(spaced, 99, stop=(" 3",), next_ids=tokenizer.ids_with_space)
    assert given[:2] == ("3: 1", "stop")
