"""Ids become whole characters, up to a stop string."""

import random

import pytest
import sentencepiece

from data.tokenizer import Tokenizer
from inference.sampling import Sampling
from inference.text_stream import StreamedText, TextStream
from tests.conftest import write_corpus

SUM = "sum 3: 1 + 2 = 3;\n"
SPACES = "emoji 🤗👩‍👩‍👧 and é, tabs\t\tand  spaces "
TEXTS = [SUM, SPACES, "\u2581 literal, \x00 control, \r\n", " leading"]


@pytest.fixture(scope="module")
def tokenizer(packed) -> Tokenizer:
    return Tokenizer(packed / "tokenizer.model")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Tokenizer:
    """One that writes a space before every text and drops it when decoding, as Llama's does."""
    folder = tmp_path_factory.mktemp("foreign")
    settings = {"model_type": "bpe", "vocab_size": 400, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        input=str(write_corpus(folder / "sums.jsonl")), model_prefix=str(folder / "t"), **settings
    )
    return Tokenizer(folder / "t.model")


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.add, ids), stream.end()]


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
    broken = tokenizer.decode(ids[:2])
    assert streamed(tokenizer, ids[:2]) == ["", "", broken]
    assert streamed(tokenizer, [*ids[:2], *tokenizer.encode("sum")])[2].startswith(broken + "s")


@pytest.mark.parametrize("which", ["tokenizer", "foreign"])
def test_random_ids_give_what_decoding_all_of_them_gives(which, request):
    tokenizer, draw = request.getfixturevalue(which), random.Random(0)
    prompt = [1, *tokenizer.encode("sum x")]
    for _ in range(300):
        ids = [draw.randrange(3, tokenizer.vocab_size) for _ in range(30)]
        ids += [draw.randrange(3, 259) for _ in range(20)]  # bytes, mostly no valid characters
        whole = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
        assert "".join(streamed(tokenizer, ids)) == whole


@pytest.fixture
def written(tokenizer):
    """Gives these tokens to a text; returns the text and why it ended."""

    def write(tokens: list[int], most: int = 99, **options) -> tuple[str, str | None]:
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
        pieces, reasons = zip(*delivered, strict=True)
        assert "".join(pieces) == text.text
        assert reasons == (None,) * (len(reasons) - 1) + (text.finish_reason,)
        return text.text, text.finish_reason

    return write


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((";",), "sum 3: 1 + 2 = 3"),
        (("2 = 4", "3;"), "sum 3: 1 + 2 = "),
        (("sum",), ""),
        ((" = 3", " + "), "sum 3: 1"),
        (("m", "u"), "s"),  # one piece holds both
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_given(written, tokenizer, stop, expected):
    assert written(tokenizer.encode(SUM), stop=stop) == (expected, "stop")


def test_a_text_ends_with_its_length_or_the_end_piece(written, tokenizer):
    ids, eos = tokenizer.encode(SUM), tokenizer.eos_id
    assert written(ids, stop=("nothing of it", "")) == (SUM, None)
    assert written([*ids, 5, 5], len(ids)) == (SUM, "length")
    assert written([*ids, eos, 5], len(ids) + 1) == (SUM, "stop")


def test_the_beginning_of_a_stop_string_is_held_back_until_the_rest_does_not_come(
    written, tokenizer
):
    ids = tokenizer.encode("2 = 3; ")
    assert written(ids, stop=("3; x",)) == ("2 = ", None)
    assert written([*ids, tokenizer.eos_id], stop=("3; x",)) == ("2 = 3; ", "stop")
    assert written(ids, len(ids), stop=("3; x",)) == ("2 = 3; ", "length")


def test_the_space_at_a_prompts_end_is_not_given_again_and_is_in_no_stop_string(written, tokenizer):
    ids = tokenizer.encode(" 3: 1 3")
    given = written(ids, stop=(" 3",), next_ids=tokenizer.ids_with_space)
    assert given == ("3: 1", "stop")
