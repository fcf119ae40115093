import re
from pathlib import Path

import pytest

from lm.common.errors import UsageError
from lm.data.tokenizer import Tokenizer
from lm.data.tokenizer_training import train_tokenizer

MANY_CHINESE = ["".join(map(chr, range(0x4E00 + i, 0x4E00 + i + 40))) for i in range(0, 4000, 40)]


NASTY = {
    "nothing": "",
    "Chinese": "第1句:你好,世界。「龘」",
    "emoji joined by ZWJ": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "tabs and line ends": "\tif x:\n\n\t\treturn\t\r\nb\r\n\r\r\n",
    "runs of spaces": "   a  b     c      ",
    "one space": " ",
    "other line ends": "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1d\x1e",
    "NUL": "\0a\0\0b\0",
    "space symbol": "\u2581",
    "space symbols and spaces": "\u2581\u2581a\u2581 \u2581 b \u2581",
    "byte order mark": "\ufeffa\ufeff",
    "begin piece": "<s>",
    "other pieces": "a</s>b<unk><0x41><0x0A>",
    "composed and decomposed": "é e\u0301 \u0301 Å A\u030a \u212b ﬁ ① ½",
    "last code point": "\U0010ffff",
    "noncharacters": "\ufffe\uffff\ufffd",
    "right to left": "\u202eabc\u202c שלום مرحبا",
    "Hangul": "한국어 \u1112\u1161\u11ab",
    "256 code points": "".join(map(chr, range(256))),
    "a long word": "a" * 5000,
}


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
def test_decoding_returns_the_text_exactly(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
    assert tokenizer.encode_batch(["x", text]) == [tokenizer.encode("x"), ids]


def test_ids_without_a_piece_and_cut_characters_can_be_decoded(tokenizer):
    ids = tokenizer.encode("龘")
    assert tokenizer.decode(ids[:-1]).strip("\ufffd") == ""
    assert tokenizer.decode([400, *ids, 10_000]) == "龘"


def test_ids_with_space_are_the_pieces_that_decode_to_a_leading_space(tokenizer):
    one = tokenizer.encode("1")
    decoded = {id: tokenizer.decode([*one, id]) for id in range(3, 400)}
    spaced = [id for id, text in decoded.items() if text.startswith("1 ")]
    assert tokenizer.ids_with_space == [id for id in spaced if not tokenizer._model.is_byte(id)]
    assert 5 < len(spaced) < 300


def test_a_space_at_the_end_of_a_prompt_is_left_to_the_next_piece(tokenizer):
    for text in ("1 + ", "1  ", " "):
        ids, next_ids = tokenizer.encode_prompt(text)
        assert ids == [tokenizer.bos_id, *tokenizer.encode(text[:-1])]
        assert next_ids == tokenizer.ids_with_space
    for text in ("1 +", " 1", "1\n", "1\t"):
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        assert tokenizer.encode_prompt(text) == (ids, [])


@pytest.mark.parametrize("behind", [" the cat sat on the mat\n", "", "\0\u2581"])
def test_characters_without_a_piece_are_spelled_in_bytes(tmp_path, behind):
    train_tokenizer([text + behind for text in MANY_CHINESE], 300, tmp_path / "t")
    tokenizer = Tokenizer(tmp_path / "t")
    assert tokenizer.vocab_size == 300
    for text in ("".join(MANY_CHINESE), "a b \u2581 c ", "\0 \u2581 1 + 1"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert 0 not in tokenizer.encode(text)


def test_a_text_trains_the_same_pieces_with_and_without_line_ends(texts, tmp_path):
    """SentencePiece itself would drop a line of more than 64 KiB without a message."""
    joined = " ".join(text.strip() for text in texts * 4)
    ends = {"lines": joined.replace("; ", ";\n"), "one line": joined, "and one line": joined + "\n"}
    sizes = {}
    for name, text in ends.items():
        train_tokenizer([text], 400, tmp_path / name)
        sizes[name] = len(Tokenizer(tmp_path / name).encode(joined))
    assert len(joined.encode()) > 1 << 17
    assert sizes["one line"] == sizes["and one line"] == pytest.approx(sizes["lines"], rel=0.02)


UNSUITABLE = {
    "a small vocabulary": (["hello world, this is a small text\n"] * 20, 261),
    "one sentence often": (["hello world, this is a small text\n"] * 20, 6400),
    "many characters": (MANY_CHINESE[:20], 6400),
}


@pytest.mark.parametrize(("texts", "vocab_size"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_an_unfit_vocabulary_is_refused_with_a_number_that_works(tmp_path, texts, vocab_size):
    path = tmp_path / "t"
    with pytest.raises(UsageError, match=f"{vocab_size}.*: pass --vocab_size") as error:
        train_tokenizer(texts, vocab_size, path)
    assert not path.exists()
    size = int(re.search(r"--vocab_size (\d+)", str(error.value))[1])
    train_tokenizer(texts, size, path)
    assert Tokenizer(path).decode(Tokenizer(path).encode("ok")) == "ok"
    if vocab_size > size:
        train_tokenizer(texts, vocab_size, path, may_shrink=True)
        assert Tokenizer(path).vocab_size == size


@pytest.mark.parametrize("content", [None, b"", b"no model\n" * 20, bytes(1000), "cut"])
def test_a_file_that_is_no_model_is_refused_by_name(tokenizer, tmp_path, content):
    if content == "cut":
        content = Path(tokenizer.path).read_bytes()[:5000]
    if content is not None:
        (tmp_path / "t.model").write_bytes(content)
    with pytest.raises(UsageError, match=str(tmp_path / "t.model")):
        Tokenizer(tmp_path / "t.model")
