"""Tokenizers in a tokenizer.json have the interface of `Tokenizer` and the ids of transformers."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from conftest import REPOSITORY, error_of
from json_tokenizers import MARKERS, write_tokenizer
from test_tokenizer import NASTY
from tokenizers import decoders, models

from lm.data.tokenizer import (
    JsonTokenizer,
    Tokenizer,
    copy_tokenizer,
    open_tokenizer,
    tokenizer_hash,
)

VOCAB = 700
CHINESE = (REPOSITORY / "README_zh.md").read_text("utf-8")  # some pieces end within a character
TEXTS = [*NASTY.values(), "12345 + 678 = 13023", "I'LL we're  it's\n\n\n  x"]
TEXTS += [f"a{name}b {name}" for kind in MARKERS.values() for name in (kind[0], *kind[2])]


@pytest.fixture(scope="module", params=MARKERS)
def folder(request, texts, tmp_path_factory) -> Path:
    """A folder with a tokenizer.json and a tokenizer_config.json."""
    folder = tmp_path_factory.mktemp(request.param)
    return write_tokenizer(folder, request.param, [*texts, CHINESE], VOCAB)


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return open_tokenizer(folder)


def test_ids_and_texts_are_those_of_auto_tokenizer(folder, tokenizer, texts, tmp_path):
    from transformers import AutoTokenizer

    shutil.copytree(folder, tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    # SmolLM2's file names GPT2Tokenizer, which would use another pre-tokenizer.
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "t")
    all_texts = [*TEXTS, *texts]
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in all_texts]
    assert tokenizer.encode_batch(all_texts) == expected
    decoded = [theirs.decode(ids, skip_special_tokens=True) for ids in expected]
    assert [tokenizer.decode(ids) for ids in expected] == decoded
    assert (tokenizer.bos_id, tokenizer.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert tokenizer.vocab_size == len(theirs) == VOCAB


def test_decoding_returns_the_text_exactly_and_the_name_of_a_marker_is_encoded_as_text(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
        assert tokenizer.encode_batch([text, "x"]) == [ids, tokenizer.encode("x")]
        assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
    one, (ids, next_ids) = tokenizer.encode("1"), tokenizer.encode_prompt("1 + ")
    assert ids == [tokenizer.bos_id, *tokenizer.encode("1 +")]
    assert 5 < len(next_ids) < 300
    assert all(tokenizer.decode([*one, i]).startswith("1 ") for i in next_ids)


def test_a_copied_tokenizer_has_the_same_hash_in_any_folder(folder, packed, tmp_path):
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


def test_files_without_byte_level_bpe_or_without_markers_are_refused_in_one_line(folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    assert "no such tokenizer file" in error_of(open_tokenizer, path)
    for content in ("", "{}", "\0"):
        path.write_text(content)
        assert "not a tokenizer.json" in error_of(open_tokenizer, tmp_path)
    shutil.copy(folder / "tokenizer.json", path)
    assert "no piece that ends a document" in error_of(open_tokenizer, path)
    for config, reason in (("{}", "no eos_token"), ('{"eos_token": "<no>"}', "has no piece <no>")):
        (tmp_path / "tokenizer_config.json").write_text(config)
        assert reason in error_of(open_tokenizer, path)
    other = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    other.decoder = decoders.ByteFallback()
    other.save(str(path))
    assert "only byte-level BPE can be read" in error_of(open_tokenizer, tmp_path)
