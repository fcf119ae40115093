"""A SentencePiece model and its tokenizer.json give the same ids, whatever the text."""

import json
import random
import shutil
import sysconfig
from pathlib import Path

import pytest
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from test_tokenizer import MANY_CHINESE, NASTY

from lm.common.errors import UsageError
from lm.data.tokenizer import TOKENIZER_FILE, Tokenizer
from lm.data.tokenizer_training import train_tokenizer
from lm.formats.tokenizer_json import convert, remove_escapes, restore

STDLIB = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
PYTHON = [path.read_text(encoding="utf-8") for path in STDLIB[:15]]
KINDS = ModelProto.SentencePiece


@pytest.fixture(scope="module", params=["Python", "Chinese", "dummy prefix"])
def pair(request, tmp_path_factory) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """A tokenizer, and its tokenizer.json saved and loaded."""
    path = tmp_path_factory.mktemp("pair") / "t.model"
    texts, vocab_size = (PYTHON, 1000) if request.param != "Chinese" else (MANY_CHINESE, 2000)
    train_tokenizer(texts, vocab_size, path, may_shrink=True)
    if request.param == "dummy prefix":
        changed(path, path, DUMMY_PREFIX)
    return both(path)


def both(path: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    tokenizer = Tokenizer(path)
    convert(tokenizer).save(str(path.with_suffix(".json")))
    converted = tokenizers.Tokenizer.from_file(str(path.with_suffix(".json")))
    converted.encode_special_tokens = True
    return tokenizer, converted


def changed(source: Path, path: Path, change) -> Path:
    """Write a changed copy of a SentencePiece model to `path`; return `path`."""
    copy = ModelProto.FromString(source.read_bytes())
    change(copy)
    path.write_bytes(copy.SerializeToString())
    return path


def set_field(spec: str, field: str, value):
    return lambda model: setattr(getattr(model, spec), field, value)


def set_piece(index: int, field: str, value):
    return lambda model: setattr(model.pieces[index], field, value)


NORMALIZER, TRAINER = "normalizer_spec", "trainer_spec"
DUMMY_PREFIX = set_field(NORMALIZER, "add_dummy_prefix", True)  # as in Llama 2's tokenizer


def assert_equal(pair, texts: list[str]) -> None:
    tokenizer, converted = pair
    encodings = converted.encode_batch(texts, add_special_tokens=False)
    for text, ours, theirs in zip(texts, tokenizer.encode_batch(texts), encodings, strict=True):
        assert theirs.ids == ours, repr(text)
        assert converted.decode(ours) == tokenizer.decode(ours), repr(text)


def test_nasty_and_random_text_has_equal_ids_and_equal_decoded_text(pair):
    chooser = random.Random(1)
    ranges = [(0, 128), (0, 0x3000), (0x2580, 0x2584), (0x4E00, 0x9FFF), (0xE000, 0x110000)]
    ranges += [(0x1F300, 0x1FA00), (0x590, 0x700), (0x300, 0x370)]

    def random_text() -> str:
        low, high = chooser.choice(ranges)
        parts = [chr(chooser.randrange(low, high)) for _ in range(chooser.randrange(60))]
        parts += chooser.choices([*" \n\t\r\u2581\u200da1", "<s>", "</s>", "<unk>", "<0x41>"], k=9)
        chooser.shuffle(parts)
        return "".join(parts)

    assert_equal(pair, [*NASTY.values(), *PYTHON, *(random_text() for _ in range(2000))])


def test_ids_are_equal_whatever_the_scores_of_the_pieces(packed, tmp_path):
    """Several pairs may join to one piece; every text forms this piece from the same pair."""
    chooser = random.Random(4)
    for _ in range(100):
        n_words = chooser.randrange(2, 40)
        words = {"".join(chooser.choices("aab", k=n % 6 + 2)) for n in range(n_words)}
        words |= {"a" * n for n in range(2, 12) if chooser.random() < 0.5}
        order = chooser.sample(sorted(words), len(words))

        def rewrite(copy, order=order):
            del copy.pieces[259:]
            for rank, piece in enumerate([*order, "a", "b", "\u2581"]):
                copy.pieces.add(piece=piece, score=-rank, type=KINDS.NORMAL)

        pair = both(changed(packed / TOKENIZER_FILE, tmp_path / "t.model", rewrite))
        texts = ["".join(chooser.choices("aaab", k=30)) for _ in range(60)]
        assert_equal(pair, [*texts, *("a" * n for n in range(1, 60))])


def test_spaces_stay_spaces_and_a_model_without_a_space_piece_has_equal_ids(tokenizer, tmp_path):
    def rewrite(copy):
        kept = [piece for piece in copy.pieces if "\u2581" not in piece.piece]
        del copy.pieces[:]
        copy.pieces.extend(kept)

    vocabulary = convert(tokenizer).get_vocab()
    assert " " in vocabulary
    assert not any("\u2581" in piece for piece in vocabulary)
    pair = both(changed(Path(tokenizer.path), tmp_path / "t.model", rewrite))
    assert " " not in pair[1].get_vocab()
    assert_equal(pair, [*NASTY.values(), "1 + 1 = 2", "\u2581 \u2581"])


REFUSED = {
    "is not BPE": set_field(TRAINER, "model_type", 1),
    "has no pieces for bytes": set_field(TRAINER, "byte_fallback", False),
    "changes characters": set_field(NORMALIZER, "precompiled_charsmap", b"1234"),
    "puts a space after a text": set_field(TRAINER, "treat_whitespace_as_suffix", True),
    "removes spaces": set_field(NORMALIZER, "remove_extra_whitespaces", True),
    "keeps spaces as they are": set_field(NORMALIZER, "escape_whitespaces", False),
    "user-defined or unused pieces": set_piece(300, "type", KINDS.USER_DEFINED),
    "the same score": set_piece(260, "score", -0.0),
    "a character that is no piece": set_piece(270, "piece", "12龘"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_cannot_be_converted_is_refused_with_a_reason(packed, tmp_path, reason):
    path = Path(shutil.copy(packed / TOKENIZER_FILE, tmp_path))
    tokenizer = Tokenizer(path)
    changed(path, path, REFUSED[reason])  # SentencePiece would not open some of these
    with pytest.raises(UsageError, match=reason) as error:
        convert(tokenizer)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("chat", [False, True])
def test_a_trained_model_is_restored_from_its_tokenizer_json_byte_for_byte(pair, tmp_path, chat):
    tokenizer, out = pair[0], tmp_path / "restored.model"
    converted = convert(tokenizer)
    if chat:
        remove_escapes(converted)
    converted.enable_padding()
    converted.enable_truncation(9)
    converted.save(str(tmp_path / "t.json"))
    model = ModelProto.FromString(Path(tokenizer.path).read_bytes())
    can = not model.normalizer_spec.add_dummy_prefix  # training here never sets it
    assert restore(tmp_path / "t.json", out) == out.exists() == can
    assert not can or out.read_bytes() == Path(tokenizer.path).read_bytes()


CHANGES = {
    "merges in another order": lambda json: json["model"]["merges"].reverse(),
    "two bytes swapped": lambda json: json["model"]["vocab"].update({"<0x01>": 5, "<0x02>": 4}),
    "another normalizer": lambda json: json.update(normalizer={"type": "NFC"}),
    "not a tokenizer": lambda json: json.pop("model"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tokenizer_json_that_differs_in_any_way_is_not_restored(tokenizer, tmp_path, change):
    path = tmp_path / "t.json"
    convert(tokenizer).save(str(path))
    assert restore(path, tmp_path / "again.model")
    content = json.loads(path.read_text(encoding="utf-8"))
    CHANGES[change](content)
    path.write_text(json.dumps(content), encoding="utf-8")
    assert not restore(path, tmp_path / "other.model")
    assert not (tmp_path / "other.model").exists()
