import errno
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from data import packing
from data.errors import DataError
from data.packing import PackingOptions, prepare
from data.shards import ShardWriter, read_description
from data.tokenizer import Tokenizer
from data.tokenizer_training import train_tokenizer

DOCUMENTS = [f"document {i}: {i} and {i * i} 第{i}句 \u2581\n" for i in range(400)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    lines = [json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def pack(files, out: Path, progress=lambda n_bytes: None, **changes) -> Path:
    settings = {"vocab_size": 300, "val_fraction": 0.1, "workers": 1, "skip_bad_lines": False}
    files = [str(file) for file in (files if isinstance(files, list) else [files])]
    prepare(files, out, PackingOptions(**settings | changes), progress)
    return out


def pack_documents(documents: list[str], folder: Path, name="out", **changes) -> Path:
    return pack(write_jsonl(folder / f"{name}.jsonl", documents), folder / name, **changes)


def description(out: Path) -> dict:
    return json.loads((out / "dataset.json").read_text(encoding="utf-8"))


def stream(out: Path, split: str) -> np.ndarray:
    shards = description(out)["splits"][split]["shards"]
    pieces = [np.fromfile(out / shard["file"], description(out)["dtype"]) for shard in shards]
    return np.concatenate(pieces or [np.empty(0, np.uint16)])


def documents(out: Path, split: str) -> list[str]:
    """What the shards hold, read without this project's code: BOS, text, EOS and so on."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    found, current = [], None
    for token in stream(out, split).tolist():
        if token == model.bos_id():
            assert current is None, "a document begins inside another"
            current = []
        elif token == model.eos_id():
            found.append(model.decode(current))
            current = None
        else:
            current.append(token)
    assert current is None, "the last document has no end"
    return found


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return pack_documents(DOCUMENTS, tmp_path_factory.mktemp("packed"))


def test_train_and_validation_together_hold_every_document_once(packed):
    assert Counter(documents(packed, "train") + documents(packed, "val")) == Counter(DOCUMENTS)


@pytest.mark.parametrize("val_fraction", [0.0, 0.1])
@pytest.mark.parametrize("split", ["train", "val"])
def test_documents_stand_in_the_order_of_the_corpus(tmp_path, split, val_fraction):
    out = pack_documents(DOCUMENTS, tmp_path, val_fraction=val_fraction)
    places = [DOCUMENTS.index(document) for document in documents(out, split)]
    assert places == sorted(places)


def test_the_description_counts_what_the_shards_hold(packed):
    for split in ("train", "val"):
        part = description(packed)["splits"][split]
        held = documents(packed, split)
        assert part["documents"] == len(held)
        assert part["bytes"] == sum(len(text.encode()) for text in held)
        assert part["tokens"] == len(stream(packed, split))
        for shard in part["shards"]:
            data = (packed / shard["file"]).read_bytes()
            assert shard["sha256"] == hashlib.sha256(data).hexdigest()
            assert len(data) == 2 * shard["tokens"]
    tokenizer = (packed / "tokenizer.model").read_bytes()
    assert description(packed)["tokenizer_sha256"] == hashlib.sha256(tokenizer).hexdigest()
    assert description(packed)["vocab_size"] == 300


def test_what_prepare_returns_is_what_it_wrote(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    options = PackingOptions(300, val_fraction=0.1, workers=1, skip_bad_lines=False)
    returned = prepare([str(path)], tmp_path / "out", options, lambda n_bytes: None)
    assert returned == description(tmp_path / "out") == read_description(tmp_path / "out")


def test_nothing_but_the_packed_folder_remains(packed):
    names = {path.name for path in packed.iterdir()}
    assert names == {"dataset.json", "tokenizer.model", "train-00000.bin", "val-00000.bin"}
    assert {path.name for path in packed.parent.iterdir()} == {"out", "out.jsonl"}


def test_a_long_text_file_is_packed_whole_in_sections(tmp_path):
    text = "".join(f"{i} lines of text\n" for i in range(20_000))
    (tmp_path / "a.txt").write_text(text)
    out = pack(tmp_path / "a.txt", tmp_path / "out", val_fraction=0.3)
    sections = documents(out, "train") + documents(out, "val")
    assert len(sections) > 4
    assert documents(out, "val")
    assert "".join(sorted(sections, key=text.index)) == text


def test_training_documents_are_cut_in_several_ways_and_those_of_validation_in_one(tmp_path):
    once = pack_documents(DOCUMENTS, tmp_path, "once")
    thrice = pack_documents(DOCUMENTS, tmp_path, "thrice", segmentations=3)
    assert stream(thrice, "val").tolist() == stream(once, "val").tolist()
    expected = [text for text in documents(once, "train") for _ in range(3)]
    assert documents(thrice, "train") == expected
    bos = Tokenizer(thrice / "tokenizer.model").bos_id
    tokens = stream(thrice, "train")
    cuts = np.split(tokens, np.flatnonzero(tokens == bos))[1:]
    own = np.concatenate(cuts[::3])  # the first way is the tokenizer's
    assert own.tolist() == stream(once, "train").tolist()
    differ = [not np.array_equal(*pair) for pair in zip(cuts[1::3], cuts[2::3], strict=True)]
    assert sum(differ) > len(differ) / 2  # some have few pieces


def test_the_ways_are_the_same_for_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BATCH_BYTES", 1000)
    one, two = (
        pack_documents(DOCUMENTS, tmp_path, f"{n}", segmentations=2, workers=n) for n in (1, 2)
    )
    assert stream(one, "train").tolist() == stream(two, "train").tolist()


def test_empty_documents_are_left_out(tmp_path):
    out = pack_documents(["", *DOCUMENTS[:50], ""], tmp_path)
    assert Counter(documents(out, "train") + documents(out, "val")) == Counter(DOCUMENTS[:50])


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.7])
def test_about_the_asked_share_of_documents_goes_to_validation(tmp_path, fraction):
    out = pack_documents([f"text {i}" for i in range(3000)], tmp_path, val_fraction=fraction)
    assert len(documents(out, "val")) / 3000 == pytest.approx(fraction, abs=0.03)


def test_adding_documents_or_reordering_them_moves_none_to_the_other_side(tmp_path):
    some = DOCUMENTS[:200]
    more = random.Random(0).sample(DOCUMENTS, len(DOCUMENTS))
    first = pack_documents(some, tmp_path, "some", val_fraction=0.3)
    second = pack_documents(more, tmp_path, "more", val_fraction=0.3, vocab_size=350)
    assert set(documents(first, "val")) == set(documents(second, "val")) & set(some)
    assert set(documents(first, "train")) == set(documents(second, "train")) & set(some)


@pytest.mark.parametrize("n", [400, 10])  # of ten documents, one goes to validation by force
def test_the_same_text_always_falls_on_the_same_side(tmp_path, n):
    out = pack_documents(DOCUMENTS[:n] + DOCUMENTS[:n][::-1], tmp_path, val_fraction=0.01)
    assert documents(out, "val")
    assert not set(documents(out, "val")) & set(documents(out, "train"))


@pytest.mark.parametrize("n", [2, 3, 20])
def test_a_small_corpus_has_one_validation_document_at_least(tmp_path, packed, n):
    model = str(packed / "tokenizer.model")
    out = pack_documents(DOCUMENTS[:n], tmp_path, val_fraction=1e-9, tokenizer=model)
    assert len(documents(out, "val")) == 1
    assert Counter(documents(out, "train") + documents(out, "val")) == Counter(DOCUMENTS[:n])


def test_without_a_validation_share_everything_is_for_training(tmp_path):
    out = pack_documents(DOCUMENTS, tmp_path, val_fraction=0.0)
    assert documents(out, "val") == []
    assert Counter(documents(out, "train")) == Counter(DOCUMENTS)


def test_a_single_document_is_for_training(tmp_path):
    out = pack_documents(["".join(DOCUMENTS)], tmp_path)
    assert documents(out, "train") == ["".join(DOCUMENTS)]


@pytest.mark.parametrize("texts", [[], ["", "", ""]])
def test_a_corpus_without_text_is_refused(tmp_path, packed, texts):
    for tokenizer in (None, str(packed / "tokenizer.model")):
        with pytest.raises(DataError, match="text"):
            pack_documents(texts, tmp_path, tokenizer=tokenizer)
    assert os.listdir(tmp_path) == ["out.jsonl"]


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize("workers", [2, 3])
def test_the_result_is_the_same_for_any_number_of_workers(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(packing, "BATCH_BYTES", 500)  # some forty batches
    path = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    one = pack(path, tmp_path / "one")
    several = pack(path, tmp_path / "several", workers=workers)
    assert files_of(one) == files_of(several)


def test_progress_counts_every_byte_of_the_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BATCH_BYTES", 500)
    path = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    seen = []
    pack(path, tmp_path / "out", progress=seen.append, workers=2)
    assert len(seen) > 10
    assert sum(seen) == path.stat().st_size


@pytest.mark.parametrize("shard_tokens", [1, 300, 2000])
def test_several_shards_hold_the_same_stream_as_one(packed, tmp_path, monkeypatch, shard_tokens):
    monkeypatch.setattr(packing, "SHARD_TOKENS", shard_tokens)
    out = pack(packed.parent / "out.jsonl", tmp_path / "out")
    assert len(description(out)["splits"]["train"]["shards"]) > 1
    for split in ("train", "val"):
        assert np.array_equal(stream(out, split), stream(packed, split))
        for shard in description(out)["splits"][split]["shards"]:
            tokens = np.fromfile(out / shard["file"], "<u2")
            assert (tokens[0], tokens[-1]) == (1, 2)  # no document lies across two shards
    read_description(out)


def test_a_tokenizer_that_is_given_is_used_and_copied(packed, tmp_path):
    model = packed / "tokenizer.model"
    out = pack_documents(DOCUMENTS[:100], tmp_path, tokenizer=str(model), vocab_size=9999)
    assert (out / "tokenizer.model").read_bytes() == model.read_bytes()
    assert description(out)["vocab_size"] == 300
    assert Counter(documents(out, "train") + documents(out, "val")) == Counter(DOCUMENTS[:100])


@pytest.mark.parametrize("tokenizer", ["nowhere.model", "corpus"])
def test_a_tokenizer_that_is_none_leaves_nothing_behind(tmp_path, tokenizer):
    corpus = write_jsonl(tmp_path / "corpus", DOCUMENTS)
    with pytest.raises(DataError, match=tokenizer):
        pack(corpus, tmp_path / "out", tokenizer=str(tmp_path / tokenizer))
    assert os.listdir(tmp_path) == ["corpus"]


def with_bad_lines(path: Path) -> Path:
    write_jsonl(path, DOCUMENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[150] = b'{"text": "cut sh\n'
    lines[300] = b'{"text": "\xff"}\n'
    path.write_bytes(b"".join(lines))
    return path


def test_a_bad_line_ends_the_work_with_its_place_and_leaves_nothing(tmp_path, packed):
    path = with_bad_lines(tmp_path / "a.jsonl")
    for tokenizer in (None, str(packed / "tokenizer.model")):  # found in training or in encoding
        with pytest.raises(DataError, match=rf"{path}, line 151: not JSON"):
            pack(path, tmp_path / "out", tokenizer=tokenizer)
        assert os.listdir(tmp_path) == ["a.jsonl"]


def test_the_error_about_a_bad_line_names_the_flag_that_skips_it(tmp_path, packed):
    path = with_bad_lines(tmp_path / "a.jsonl")
    for tokenizer in (None, str(packed / "tokenizer.model")):
        with pytest.raises(DataError, match="--skip_bad_lines"):
            pack(path, tmp_path / "out", tokenizer=tokenizer)


@pytest.mark.parametrize("workers", [1, 2])
def test_skipped_bad_lines_are_counted_and_the_first_is_named(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(packing, "BATCH_BYTES", 500)
    path = with_bad_lines(tmp_path / "a.jsonl")
    out = pack(path, tmp_path / "out", skip_bad_lines=True, workers=workers)
    good = [d for i, d in enumerate(DOCUMENTS) if i not in (150, 300)]
    assert Counter(documents(out, "train") + documents(out, "val")) == Counter(good)
    assert description(out)["bad_documents"] == 2
    assert f"{path}, line 151: not JSON" in description(out)["first_bad_document"]


def test_a_batch_of_bad_lines_alone_is_skipped_too(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BATCH_BYTES", 1)
    path = with_bad_lines(tmp_path / "a.jsonl")
    out = pack(path, tmp_path / "out", skip_bad_lines=True)
    assert description(out)["bad_documents"] == 2


def full_disk_after(monkeypatch, n_documents: int) -> None:
    write, written = ShardWriter.write, []

    def write_until_full(self, tokens, n_bytes):
        if len(written) >= n_documents:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(n_bytes)
        write(self, tokens, n_bytes)

    monkeypatch.setattr(ShardWriter, "write", write_until_full)


def test_a_full_disk_midway_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BATCH_BYTES", 500)
    full_disk_after(monkeypatch, 100)
    path = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    with pytest.raises(OSError, match="No space left") as error:
        pack(path, tmp_path / "deep" / "out", workers=2)
    assert error.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "deep") == []
    assert multiprocessing.active_children() == []


def test_a_failure_leaves_the_folder_of_before_as_it_was(tmp_path, monkeypatch):
    out = pack_documents(DOCUMENTS[:100], tmp_path)
    before = files_of(out)
    full_disk_after(monkeypatch, 100)
    with pytest.raises(OSError, match="No space left"):
        pack_documents(DOCUMENTS, tmp_path)
    assert files_of(out) == before
    assert sorted(os.listdir(tmp_path)) == ["out", "out.jsonl"]


def test_success_replaces_the_folder_of_before(tmp_path):
    out = pack_documents(DOCUMENTS[:100], tmp_path)
    (out / "a file of another version").touch()
    pack_documents(DOCUMENTS[100:300], tmp_path)
    assert Counter(documents(out, "train") + documents(out, "val")) == Counter(DOCUMENTS[100:300])
    assert sorted(os.listdir(tmp_path)) == ["out", "out.jsonl"]
    assert not (out / "a file of another version").exists()


def test_a_killed_encoding_process_is_an_error_that_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BATCH_BYTES", 100)

    def kill_children(n_bytes):
        for child in multiprocessing.active_children():
            child.kill()

    path = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    with pytest.raises(DataError, match="--workers"):
        pack(path, tmp_path / "out", progress=kill_children)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def dead_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def leave_partial_folder(folder: Path, pid: int) -> Path:
    partial = folder / f"out.partial-{pid}"
    partial.mkdir()
    (partial / "train-00000.bin").write_bytes(b"1234")
    return partial


def test_a_partial_folder_of_a_process_that_is_gone_is_removed(tmp_path):
    partial = leave_partial_folder(tmp_path, dead_pid())
    pack_documents(DOCUMENTS, tmp_path)
    assert not partial.exists()


def test_a_partial_folder_of_a_process_that_runs_is_left_alone(tmp_path):
    partial = leave_partial_folder(tmp_path, os.getppid())
    pack_documents(DOCUMENTS, tmp_path)
    assert partial.exists()


def test_a_partial_folder_of_a_former_process_with_our_number_is_removed(tmp_path):
    """In a container every run may have the same process number."""
    leave_partial_folder(tmp_path, os.getpid())
    pack_documents(DOCUMENTS, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["out", "out.jsonl"]


def test_a_few_very_long_documents_still_train_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "TOKENIZER_SAMPLE_BYTES", 1000)
    books = ["".join(DOCUMENTS[i::4]) for i in range(4)]  # 4 KB each
    out = pack_documents(books, tmp_path)
    assert Counter(documents(out, "train") + documents(out, "val")) == Counter(books)


def test_the_tokenizer_learns_from_a_sample_of_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "TOKENIZER_SAMPLE_BYTES", 20_000)
    taken = []

    def remember(texts, vocab_size, path, **options):
        taken.extend(texts)
        train_tokenizer(taken, vocab_size, path)

    monkeypatch.setattr(packing, "train_tokenizer", remember)
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {d}" for d in DOCUMENTS * 3])
        for name in "abc"
    ]
    pack(files, tmp_path / "out")
    assert 10_000 < sum(len(text.encode()) for text in taken) < 40_000
    counts = Counter(text[0] for text in taken)
    assert set(counts) == set("abc")
    assert min(counts.values()) > max(counts.values()) / 2


def test_tokens_of_four_bytes_hold_the_same_documents(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "token_dtype", lambda vocab_size: np.dtype("<u4"))
    out = pack(packed.parent / "out.jsonl", tmp_path / "out")
    assert description(out)["dtype"] == "<u4"
    for split in ("train", "val"):
        assert documents(out, split) == documents(packed, split)
        tokens = description(out)["splits"][split]["tokens"]
        assert (out / f"{split}-00000.bin").stat().st_size == 4 * tokens


@pytest.mark.slow
def test_an_encoding_process_is_deaf_to_ctrl_c_from_its_first_moment_on():
    command = [sys.executable, "-c", "import signal; print(signal.getsignal(2).name)"]
    before = signal.getsignal(signal.SIGINT)
    with packing._deaf_to_interrupts():
        ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout == "SIG_IGN\n"
    assert signal.getsignal(signal.SIGINT) is before
