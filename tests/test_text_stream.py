"""A stream of ids gives whole characters, and ends before a stop string."""

import random

import pytest
from json_tokenizers import MARKERS, write_tokenizer
from test_tokenizer_json import DUMMY_PREFIX, changed

from lm.data.tokenizer import TOKENIZER_FILE, Tokenizer, open_tokenizer
from lm.inference.generation import StreamedText
from lm.inference.sampling import Sampling

SUM = "sum 3: 1 + 2 = 3;\n"


def write(tokenizer: Tokenizer, ids: list[int], most=None, **options) -> tuple[list[str], str]:
    """Give these ids to a text of `most` tokens (None: as many); return pieces and why it ended."""
    delivered = []
    text = StreamedText(
        prompt=[5],
        max_new_tokens=most or len(ids),
        sampling=Sampling(),
        tokenizer=tokenizer,
        deliver=lambda *piece: delivered.append(piece),
        **options,
    )
    for id in ids:
        text.take(id)
    pieces, reasons = zip(*delivered, strict=True)
    assert "".join(pieces) == text.text
    assert reasons == (None,) * (len(reasons) - 1) + (text.finish_reason,)
    return list(pieces), text.finish_reason


def test_a_character_is_delivered_when_it_is_complete_or_cannot_become_complete(tokenizer):
    ids = tokenizer.encode("🤗!")
    assert write(tokenizer, ids)[0] == ["", "", "", "🤗", "!"]
    broken = tokenizer.decode(ids[:2])
    assert write(tokenizer, ids[:2])[0] == ["", broken]
    pieces, _ = write(tokenizer, [*ids[:2], *tokenizer.encode("sum")])
    assert pieces[2].startswith(broken + "s")


@pytest.mark.parametrize("kind", ["ours", "dummy prefix", *MARKERS])
def test_streaming_random_ids_gives_the_text_of_decoding_them_all(kind, packed, texts, tmp_path):
    """Some characters are incomplete, or have a marker or an id without a piece inside."""
    draw, path = random.Random(0), packed
    if kind in MARKERS:
        path = write_tokenizer(tmp_path, kind, texts)
    elif kind == "dummy prefix":
        path = changed(packed / TOKENIZER_FILE, tmp_path / "t.model", DUMMY_PREFIX)
    tokenizer = open_tokenizer(path)
    prompt = [tokenizer.bos_id, *tokenizer.encode("sum x")]
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size + 9) for _ in range(30)]
        ids += [draw.randrange(3, 259) for _ in range(20)]  # bytes, mostly no valid characters
        ids = [id for id in ids if id != tokenizer.eos_id]  # it would end the text
        whole = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
        assert "".join(write(tokenizer, ids)[0]) == whole


# "sum" is one piece: it holds "u" and "m", and "u" comes first.
STOPS = {("2 = 4", "3;"): "sum 3: 1 + 2 = ", (" = 3", " + "): "sum 3: 1", ("m", "u"): "s"}


@pytest.mark.parametrize(("stop", "expected"), STOPS.items())
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(tokenizer, stop, expected):
    pieces, reason = write(tokenizer, tokenizer.encode(SUM), 99, stop=stop)
    assert ("".join(pieces), reason) == (expected, "stop")


def test_a_text_ends_at_max_new_tokens_or_at_the_end_token(tokenizer):
    ids, eos = tokenizer.encode(SUM), tokenizer.eos_id
    for tokens, reason in ((ids, None), ([*ids, eos, 5], "stop")):
        pieces, ended = write(tokenizer, tokens, len(ids) + 1, stop=("not in the text", ""))
        assert ("".join(pieces), ended) == (SUM, reason)
    assert write(tokenizer, [*ids, 5, 5], len(ids))[1] == "length"


def test_the_beginning_of_a_stop_string_is_held_back_until_it_cannot_continue(tokenizer):
    ids, stop, eos = tokenizer.encode("2 = 3; "), ("3; x",), tokenizer.eos_id
    assert "".join(write(tokenizer, ids, 99, stop=stop)[0]) == "2 = "
    for most, tokens, more in ((99, [*ids, eos], ""), (len(ids), ids, ""), (99, ids * 2, "2 = ")):
        assert "".join(write(tokenizer, tokens, most, stop=stop)[0]) == "2 = 3; " + more


def test_the_space_at_the_end_of_a_prompt_is_not_repeated_and_matches_no_stop_string(tokenizer):
    ids = tokenizer.encode(" 3: 1 3")
    pieces, _ = write(tokenizer, ids, 99, stop=(" 3",), next_ids=tokenizer.ids_with_space)
    assert "".join(pieces) == "3: 1"
