import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import conftest
import numpy as np
import psutil
import pytest
import sentencepiece
from conftest import REPOSITORY, error_of, wait_for
from test_tokenizer_json import changed, set_field

from lm.common.errors import UsageError
from lm.data import encoding
from lm.data import prepare as module
from lm.data.conversations import Turn, encode_conversation
from lm.data.dataset import PackedDataset
from lm.data.encoding import SPLIT_ROUNDS, SPLIT_SHARE, hash_of, split_at_random, ways_to_split
from lm.data.shards import read_description
from lm.data.tokenizer import Tokenizer

SHARDS = ("train-00000.bin", "val-00000.bin")
DOCUMENTS = [f"document {i}: {i} and {i * i} 第{i}句 \u2581\n" for i in range(400)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    lines = [json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents]
    path.write_text("".join(lines), encoding="utf-8")
    return path


pack = partial(conftest.pack, vocab_size=300)


def pack_documents(documents: list[str], folder: Path, name="out", **changes) -> Path:
    return pack(write_jsonl(folder / f"{name}.jsonl", documents), folder / name, **changes)


def stream(out: Path, split: str) -> np.ndarray:
    about = read_description(out)
    files = [out / shard["file"] for shard in about["splits"][split]["shards"]]
    return np.concatenate([np.fromfile(f, about["dtype"]) for f in files] or [np.empty(0, "u2")])


def documents(out: Path, split: str) -> list[str]:
    """Decode the texts of the shards with SentencePiece itself. Check that each text has BOS before
    it and EOS after it."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    tokens = stream(out, split)
    begins, ends = (np.flatnonzero(tokens == id) for id in (model.bos_id(), model.eos_id()))
    assert begins.tolist() == [0, *ends + 1][: len(ends)]
    assert not len(tokens) or ends[-1] == len(tokens) - 1
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    return [model.decode(tokens[begin + 1 : end].tolist()) for begin, end in spans]


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return pack_documents(DOCUMENTS, tmp_path_factory.mktemp("packed"))


@pytest.fixture
def lossy(packed, tmp_path) -> str:
    """A tokenizer that removes repeated spaces."""
    change = set_field("normalizer_spec", "remove_extra_whitespaces", True)
    return str(changed(packed / "tokenizer.model", tmp_path / "lossy.model", change))


def test_every_document_is_in_one_split_in_the_order_of_the_corpus(packed):
    about = read_description(packed)
    held = {split: documents(packed, split) for split in ("train", "val")}
    assert Counter(held["train"] + held["val"]) == Counter(DOCUMENTS)
    assert len(held["val"]) / len(DOCUMENTS) == pytest.approx(0.1, abs=0.05)
    for split, texts in held.items():
        assert texts == sorted(texts, key=DOCUMENTS.index)
        part = about["splits"][split]
        assert part["documents"] == len(texts)
        assert part["bytes"] == sum(len(text.encode()) for text in texts)
        assert part["tokens"] == len(stream(packed, split))
        data = (packed / part["shards"][0]["file"]).read_bytes()
        assert part["shards"][0]["sha256"] == hashlib.sha256(data).hexdigest()
    tokenizer = (packed / "tokenizer.model").read_bytes()
    assert about["tokenizer_sha256"] == hashlib.sha256(tokenizer).hexdigest()
    assert set(files_of(packed)) == {"dataset.json", "tokenizer.model", *SHARDS}


def test_the_split_never_changes():
    """A hash chooses a document's split. Another hash would move documents to the other split."""
    assert hash_of("句".encode()) == 1228714624519560309
    assert hash_of("句".encode(), digest_size=16) == 12239898487114312437


def test_each_round_splits_a_piece_with_chance_split_share(packed):
    """The piece here can be split in one way only, into two pieces that cannot be split."""
    tokenizer, n = Tokenizer(packed / "tokenizer.model"), 20_000
    ways_of = ways_to_split(tokenizer)
    single = [id for id, ways in ways_of.items() if len(ways) == 1]
    pair = next(id for id in single if not any(ways_of[part] for part in ways_of[id][0]))
    split = split_at_random([pair] * n, tokenizer, np.random.default_rng(0))
    assert split.count(pair) == pytest.approx(n * (1 - SPLIT_SHARE) ** SPLIT_ROUNDS, rel=0.02)
    assert len(split) == n + (n - split.count(pair))


def test_training_documents_are_tokenized_in_several_ways_and_validation_documents_in_one(tmp_path):
    once = pack_documents(DOCUMENTS, tmp_path, "once")
    thrice = pack_documents(DOCUMENTS, tmp_path, "thrice", segmentations=3)
    assert stream(thrice, "val").tolist() == stream(once, "val").tolist()
    texts = documents(once, "train")
    assert documents(thrice, "train") == texts + [text for text in texts for _ in range(2)]
    tokens, own = stream(thrice, "train"), stream(once, "train")
    first = read_description(thrice)["splits"]["train"]["first_tokens"]
    assert tokens[:first].tolist() == own.tolist()  # the first segmentation is the tokenizer's
    assert PackedDataset(thrice, "train", 8).n_first == first // 8
    assert PackedDataset(once, "train", 8).n_first == 0
    bos = Tokenizer(thrice / "tokenizer.model").bos_id
    cuts = np.split(tokens[first:], np.flatnonzero(tokens[first:] == bos))[1:]
    differ = [not np.array_equal(*pair) for pair in zip(cuts[::2], cuts[1::2], strict=True)]
    assert sum(differ) > len(differ) / 2  # two random ways may be equal


def test_val_fraction_0_trains_on_all_documents_and_empty_text_is_refused(tmp_path, packed):
    tokenizer = str(packed / "tokenizer.model")
    pack_documents(DOCUMENTS, tmp_path, vocab_size=310)  # the next call must not use this tokenizer
    out = pack_documents(DOCUMENTS[:50], tmp_path, val_fraction=0, tokenizer=tokenizer)
    assert documents(out, "train") == DOCUMENTS[:50]
    for other in (None, tokenizer):
        assert "no text" in error_of(pack_documents, ["", ""], tmp_path, tokenizer=other)


def test_adding_or_reordering_documents_moves_none_to_the_other_split(tmp_path):
    some = DOCUMENTS[:200]
    more = ["", *random.Random(0).sample(DOCUMENTS, len(DOCUMENTS)), *DOCUMENTS[::-1]]
    first = pack_documents(some, tmp_path, "some", val_fraction=0.3)
    second = pack_documents(more, tmp_path, "more", val_fraction=0.3, vocab_size=350)
    assert set(documents(first, "val")) == set(documents(second, "val")) & set(some)
    assert set(documents(first, "train")) == set(documents(second, "train")) & set(some)


def test_the_result_is_the_same_for_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_BYTES", 500)  # 44 batches
    path = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    one, seen = pack(path, tmp_path / "one", segmentations=2), []
    several = pack(path, tmp_path / "several", seen.append, segmentations=2, workers=3)
    assert files_of(one) == files_of(several)
    assert len(seen) > 10
    assert sum(seen) == path.stat().st_size  # the progress counts every byte


def kill_children(n_bytes: int) -> None:
    for child in multiprocessing.active_children():
        child.kill()


def fill_the_disk(n_bytes: int) -> None:
    raise OSError("No space left on device")


@pytest.mark.parametrize(
    ("trouble", "error", "says"),
    [(kill_children, UsageError, "--workers"), (fill_the_disk, OSError, "No space left")],
)
def test_an_error_while_encoding_leaves_the_older_folder_and_no_process(
    tmp_path, monkeypatch, trouble, error, says
):
    out = pack_documents(DOCUMENTS[:100], tmp_path)
    before = files_of(out)
    monkeypatch.setattr(encoding, "BATCH_BYTES", 500)
    flags = {"workers": 2, "progress": trouble}
    assert says in error_of(pack_documents, DOCUMENTS, tmp_path, error=error, **flags)
    assert files_of(out) == before
    assert sorted(os.listdir(tmp_path)) == ["out", "out.jsonl"]
    assert multiprocessing.active_children() == []


KILLED = """
import multiprocessing, os, signal
from lm.data.encoding import BATCH_BYTES, encode_all
def records():
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    yield os.kill(os.getpid(), signal.SIGKILL)
list(encode_all(records(), len, 2, BATCH_BYTES + 1))
"""


def test_encoding_processes_end_when_the_preparation_is_killed():
    command = [sys.executable, "-c", KILLED]
    ended = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2
    wait_for(
        lambda: all(psutil.Process(x).status() == "zombie" for x in pids if psutil.pid_exists(x))
    )


def test_a_few_very_long_documents_still_train_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1000)
    books = ["".join(DOCUMENTS[i::4]) for i in range(4)]  # 4 KB each
    out = pack_documents(books, tmp_path)
    assert Counter(documents(out, "train") + documents(out, "val")) == Counter(books)


def test_the_only_document_trains_even_if_its_hash_is_for_validation(tmp_path):
    out = pack_documents(DOCUMENTS[:1], tmp_path, "one", vocab_size=None, val_fraction=0.999999)
    assert documents(out, "train") == DOCUMENTS[:1]
    assert documents(out, "val") == []
    out = pack_documents(DOCUMENTS, tmp_path, "more", val_fraction=0.999999, segmentations=2)
    assert documents(out, "train") == DOCUMENTS[:1] * 2
    assert documents(out, "val") == DOCUMENTS[1:]


def test_markers_in_a_text_begin_and_end_documents_on_request(tmp_path):
    texts = [f"<|im_start|>{i} + 1<|im_end|> <|im_start|>{i}<|im_end|>\n" for i in range(60)]
    texts += [f"<s> {i}  + 2 </s>" for i in range(60)] + [f"{i} + 3  " for i in range(60)]
    out = pack_documents(texts, tmp_path, val_fraction=0, markers=True)
    expected = [part for i in range(60) for part in (f"{i} + 1", str(i))]
    expected += [f"{i}  + 2" for i in range(60)] + [f"{i} + 3  " for i in range(60)]
    assert documents(out, "train") == expected
    assert "|" not in Tokenizer(out / "tokenizer.model").pieces_of_text
    without = pack_documents(texts, tmp_path, "as_text", val_fraction=0)
    assert documents(without, "train") == texts


def test_a_document_that_the_tokenizer_changes_is_bad_and_shown(tmp_path, lossy):
    texts, flags = ["1 and 2", "a   b"], {"val_fraction": 0, "tokenizer": lossy}
    shown = "line 2: the tokenizer turns 'a   b' into 'a b': pass another"
    assert shown in error_of(pack_documents, texts, tmp_path, **flags)
    flags["skip_bad_lines"] = True
    about = read_description(pack_documents(texts, tmp_path, **flags))
    assert (about["bad_documents"], about["splits"]["train"]["bytes"]) == (1, len(texts[0]))
    # If every document is bad, the first is shown.
    assert "line 1: the tokenizer" in error_of(pack_documents, texts[1:], tmp_path, **flags)
    assert "line 1: " in error_of(pack_documents, [0], tmp_path, skip_bad_lines=True)


@pytest.mark.parametrize("kind", ["text", "conversations"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_skipping_bad_documents_is_advised_only_if_it_keeps_half_of_the_file(
    lossy, tmp_path, share, kind
):
    good, bad = '{"text": "1 + 1"}', "{broken"
    if kind == "conversations":  # the tokenizer changes the bad conversations
        good = '{"prompt": "1 +", "response": " 2"}'
        bad = good.replace(" 2", "a   b")
    lines = [bad if i % 10 < 10 * share else good for i in range(500)]
    (tmp_path / "a.jsonl").write_text(f"{good}\n" * 500)  # other files do not count
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    said = error_of(pack, tmp_path, tmp_path / "out", kind=kind, tokenizer=lossy)
    assert ("--skip_bad_lines" in said) == (share < 0.5)


def test_lines_after_an_open_quote_and_texts_between_markers_count_as_documents(tmp_path, lossy):
    (path := tmp_path / "a.csv").write_text('id,text\n1,a\n2,"b\n' + "3,c\n" * 100)
    said = error_of(pack, path, tmp_path / "out", tokenizer=lossy)
    assert "line 3: cannot be read" in said
    assert "--skip_bad_lines" not in said
    # Too little text is left for a tokenizer: the bad line is the reason.
    assert "line 3: cannot be read" in error_of(pack, path, tmp_path / "out")
    for n_good, advised in ((2, True), (0, False)):
        path = write_jsonl(tmp_path / "a.jsonl", ["a   b</s>" + "1 + 1</s>" * n_good] * 4)
        said = error_of(pack, path, tmp_path / "out", tokenizer=lossy, markers=True)
        assert ("--skip_bad_lines" in said) == advised


def test_the_tokenizer_learns_from_a_sample_of_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_BYTES", 20_000)
    monkeypatch.setattr(module, "train_tokenizer", lambda texts, *_, **__: taken.extend(texts))
    taken = []
    for name in "abc":
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {d}" for d in DOCUMENTS * 3])
    error_of(pack, tmp_path, tmp_path / "out")  # there is no tokenizer
    assert 10_000 < sum(len(text.encode()) for text in taken) < 40_000
    a, b, c = Counter(text[0] for text in taken).values()
    assert min(a, b, c) > max(a, b, c) / 2


def chat(i: int) -> list[Turn]:
    """Return conversation number i, with one to three questions. All conversations differ."""
    more = [Turn("user", f"{i} + {i}?\n"), Turn("assistant", f" {i} 第 {2 * i}")]
    return [Turn("user", f"1 + {i}?"), Turn("assistant", f"{1 + i}"), *more * (i % 3)]


CHATS = [chat(i) for i in range(300)]


def write_chats(path: Path, change=lambda turns: turns) -> Path:
    rows = [change([turn._asdict() for turn in turns]) for turns in CHATS]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def test_conversations_are_stored_with_their_answers(packed, tmp_path, monkeypatch):
    """numpy reads the files, so that a fault of this project's reader cannot hide."""
    monkeypatch.setattr(encoding, "BATCH_BYTES", 2000)
    # A last question without an answer is not stored.
    path = write_chats(tmp_path / "a.jsonl", lambda turns: [*turns, turns[0]])
    how = {"kind": "conversations", "tokenizer": str(packed), "val_fraction": 0, "workers": 2}
    out = pack(path, tmp_path / "out", **how)
    tokenizer, tokens, positions = Tokenizer(out / "tokenizer.model"), [], []
    for turns in CHATS:
        ids, answers = encode_conversation(tokenizer, turns)
        positions += [[len(tokens) + at for at in (0, *answer)] for answer in answers]
        tokens += ids[: answers[-1][1]]
    description = read_description(out)
    part = description["splits"]["train"]
    assert stream(out, "train").tolist() == tokens
    found = np.fromfile(out / part["answers"]["file"], "<i8").reshape(-1, 3)
    assert found.tolist() == positions
    assert (description["kind"], part["documents"]) == ("conversations", len(CHATS))
    assert part["answers"]["count"] == len(positions)
    assert part["answers"]["tokens"] == sum(end - begin for _, begin, end in positions)
    said = [turn.content for turns in CHATS for turn in turns[1::2]]
    assert part["bytes"] == sum(len(text.encode()) for text in said)


def test_answers_with_weight_0_do_not_change_the_split(packed, tmp_path):
    """Only the last answer of each conversation keeps its weight."""
    last = write_chats(
        tmp_path / "b.jsonl", lambda turns: [*({"weight": 0} | t for t in turns[:-1]), turns[-1]]
    )
    how = {"kind": "conversations", "tokenizer": str(packed)}
    a = pack(write_chats(tmp_path / "a.jsonl"), tmp_path / "a", **how)
    b = pack(last, tmp_path / "b", **how)
    for split, n in (("train", 270), ("val", 30)):
        assert stream(a, split).tolist() == stream(b, split).tolist()
        documents = read_description(b)["splits"][split]["documents"]
        assert documents == pytest.approx(n, abs=15)


@pytest.mark.parametrize(
    ("n_bytes", "pieces"), [(1e5, 512), (2e6, 4096), (12e6, 8192), (60e6, 16384), (1e12, 16384)]
)
def test_the_size_of_the_text_decides_the_vocabulary(n_bytes, pieces, monkeypatch):
    monkeypatch.setattr(module, "text_size", lambda files: n_bytes)
    assert module.Preparation("builtin").defaults.vocab_size == pieces
