import json
import re
import shutil
from pathlib import Path

import pytest
import tokenizers
from conftest import REPOSITORY, error_of
from json_tokenizers import MARKERS, write_tokenizer
from tokenizers import decoders, models

from lm.common.errors import UsageError
from lm.data.tokenizer import (
    JsonTokenizer,
    Tokenizer,
    copy_tokenizer,
    open_tokenizer,
    tokenizer_hash,
)
from lm.data.tokenizer_training import train_tokenizer

VOCAB = 700  # of a tokenizer.json
CHINESE = (REPOSITORY / "README_zh.md").read_text("utf-8")  # some pieces end within a character
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
TEXTS = [*NASTY.values(), "12345 + 678 = 13023", "I'LL we're  it's\n\n\n  x"]
TEXTS += [f"a{name}b {name}" for kind in MARKERS.values() for name in (kind[0], *kind[2])]
of_json = pytest.mark.parametrize("tokenizer", MARKERS, indirect=True)


@pytest.fixture(scope="module", params=["SentencePiece", *MARKERS])
def tokenizer(request, packed, texts, tmp_path_factory) -> Tokenizer:
    """A SentencePiece model, or a tokenizer.json beside a tokenizer_config.json."""
    folder = packed
    if request.param in MARKERS:
        folder = tmp_path_factory.mktemp(request.param)
        write_tokenizer(folder, request.param, [*texts, CHINESE], VOCAB)
    return open_tokenizer(folder)


def test_decoding_returns_the_text_exactly_and_the_name_of_a_marker_is_encoded_as_text(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
        assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
        assert tokenizer.encode_batch(["x", text]) == [tokenizer.encode("x"), ids]


def test_ids_without_a_piece_and_cut_characters_can_be_decoded(tokenizer):
    ids = tokenizer.encode("龘")
    assert tokenizer.decode(ids[:-1]).strip("\ufffd") == ""
    assert tokenizer.decode([tokenizer.vocab_size, *ids, 10_000]) == "龘"


def test_a_space_at_the_end_of_a_prompt_is_left_to_a_piece_that_begins_with_a_space(tokenizer):
    one, ids = tokenizer.encode("1"), sorted(tokenizer.pieces_of_text.values())
    spaced = [id for id in ids if tokenizer.decode([*one, id]).startswith("1 ")]
    assert 5 < len(spaced) < 300
    for text in ("1 + ", "1  ", " "):
        ids = [tokenizer.bos_id, *tokenizer.encode(text[:-1])]
        assert tokenizer.encode_prompt(text) == (ids, spaced)
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


@pytest.mark.parametrize("content", [None, b"", b"no model\n" * 20])
def test_a_file_that_is_no_model_is_refused_by_name(tmp_path, content):
    if content is not None:
        (tmp_path / "t.model").write_bytes(content)
    assert str(tmp_path / "t.model") in error_of(Tokenizer, tmp_path / "t.model")


@of_json
def test_a_copied_tokenizer_has_the_same_hash_in_any_folder(tokenizer, packed, tmp_path):
    assert tokenizer.vocab_size == VOCAB
    folder = Path(tokenizer.path).parent
    copy_tokenizer(folder, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    hashes = {tokenizer_hash(path) for path in (folder, tmp_path, tmp_path / "tokenizer.json")}
    assert len(hashes) == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "1"}))
    other = open_tokenizer(tmp_path)
    assert other.bos_id == other.eos_id == other.encode("1")[0]  # no bos_token: eos begins texts
    assert tokenizer_hash(tmp_path) not in hashes  # documents get other ids
    assert isinstance(other, JsonTokenizer)
    shutil.copy(packed / "tokenizer.model", tmp_path)
    assert not isinstance(open_tokenizer(tmp_path), JsonTokenizer)


@of_json
def test_files_without_byte_level_bpe_or_without_markers_are_refused(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    assert "no such tokenizer file" in error_of(open_tokenizer, path)
    for content in ("", "{}", "\0"):
        path.write_text(content)
        assert "not a tokenizer.json" in error_of(open_tokenizer, tmp_path)
    shutil.copy(tokenizer.path, path)
    assert "no piece that ends a document" in error_of(open_tokenizer, path)
    for config, reason in (("{}", "no eos_token"), ('{"eos_token": "<no>"}', "has no piece <no>")):
        (tmp_path / "tokenizer_config.json").write_text(config)
        assert reason in error_of(open_tokenizer, path)
    other = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    other.decoder = decoders.ByteFallback()
    other.save(str(path))
    assert "only byte-level BPE can be read" in error_of(open_tokenizer, tmp_path)
