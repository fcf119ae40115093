import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY

from benchmarks import data as benchmark
from benchmarks import data_loader, data_padding, data_preparation
from data.dataset import PackedDataset
from data.errors import DataError
from data.shards import DESCRIPTION_FILE, read_description
from data.tokenizer import Tokenizer
from model.transformer import IGNORE_INDEX

LENGTHS = np.array([5, 3, 4])  # of three documents, begin and end included: 4 + 2 + 3 targets


def test_packing_loses_the_end_of_the_stream_and_the_begins_of_documents():
    # Sequences of 4: the 12 tokens make 2, whose targets are tokens 1 to 8, of which 5 and 8 are
    # begins.
    assert data_padding.packed(LENGTHS, 4) == {"positions": 8, "useful": 6, "lost": 3}


def test_packing_loses_no_more_than_the_rest_of_a_sequence():
    # 13 tokens and sequences of 6: targets 1 to 12, the whole stream.
    assert data_padding.packed(np.array([5, 3, 5]), 6) == {"positions": 12, "useful": 10, "lost": 0}


def test_what_packing_counts_is_what_the_dataset_gives(packed):
    dataset = PackedDataset(packed, "train", 32)
    targets = torch.cat([targets for _, targets in dataset])
    counts = data_padding.packed(data_padding.document_lengths(packed), 32)
    bos_id = dataset.description["bos_id"]
    assert counts["positions"] == len(targets)
    assert counts["useful"] == int((targets != bos_id).sum())


def test_padding_fills_short_documents_and_cuts_long_ones():
    # Rows of 4 tokens have 3 targets; the document of 5 loses a token.
    assert data_padding.padded(LENGTHS, 4) == {"positions": 9, "useful": 8, "lost": 1}
    assert data_padding.padded(LENGTHS, 11) == {"positions": 30, "useful": 9, "lost": 0}


@pytest.mark.parametrize(("batch_size", "positions"), [(1, {9}), (3, {12}), (2, {10, 11})])
def test_padding_to_the_longest_of_a_batch(batch_size, positions):
    # In batches of 2 the odd one out may be any: 4+4 and 2 or 3 positions, or 3+3 and 4.
    counts = data_padding.padded_to_longest(LENGTHS, 11, batch_size)
    assert counts["positions"] in positions
    assert (counts["useful"], counts["lost"]) == (9, 0)


def test_padding_to_the_longest_cuts_as_well():
    counts = data_padding.padded_to_longest(LENGTHS, 3, 3)
    assert counts == {"positions": 6, "useful": 6, "lost": 3}


def test_documents_are_found_in_the_shards(packed, corpus):
    texts = {json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()}
    tokenizer = Tokenizer(packed / "tokenizer.model")
    (shard,) = data_padding.read_shards(packed)
    lengths = data_padding.document_lengths(packed)
    assert lengths.sum() == len(shard)
    documents = np.split(shard, np.cumsum(lengths)[:-1])
    assert {tokenizer.decode(document.tolist()) for document in documents} <= texts
    assert len(documents) == read_description(packed)["splits"]["train"]["documents"]


def test_shards_with_another_number_of_documents_are_refused(packed, tmp_path):
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    description = read_description(packed)
    description["splits"]["train"]["documents"] += 1
    (tmp_path / DESCRIPTION_FILE).write_text(json.dumps(description))
    with pytest.raises(DataError, match="documents begin in the shards"):
        data_padding.document_lengths(tmp_path)


def test_padded_batches_hold_one_document_a_row(packed):
    lengths = set(data_padding.document_lengths(packed).tolist())
    seq_len = max(lengths) - 1  # some are cut, some are filled
    batches = data_padding.padded_batches(packed, seq_len, 8, torch.device("cpu"))
    bos_id, eos_id = (read_description(packed)[name] for name in ("bos_id", "eos_id"))
    fillings = set()
    for _ in range(20):
        tokens, targets = next(batches)
        assert tokens.shape == targets.shape == (8, seq_len - 1)
        for row, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
            n = sum(answer != IGNORE_INDEX for answer in answers)
            assert answers[n:] == [IGNORE_INDEX] * (seq_len - 1 - n)
            assert row[0] == bos_id
            assert row[1:n] == answers[: n - 1]
            whole = answers[n - 1] == eos_id
            assert n + 1 in lengths if whole else n + 1 == seq_len
            fillings.add(n)
    assert len(fillings) > 1


needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux only")
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
GRANDCHILD = "import time; held = bytearray(b'x') * 80_000_000; time.sleep(1)"


@needs_proc
def test_memory_of_processes_below_counts():
    process = subprocess.Popen([sys.executable, "-c", CHILD, GRANDCHILD])
    pss, sum_of_peaks = data_preparation.watch_memory(process)
    assert process.returncode == 0
    assert 80_000_000 < pss < 160_000_000
    assert pss < sum_of_peaks < 200_000_000


def test_memory_of_a_process_that_is_gone_is_unknown():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert data_preparation.tree_memory(process.pid) == {}
    assert data_preparation.watch_memory(process) == (None, None)


def test_the_page_cache_can_be_emptied(packed):
    words = ["stat", "-f", "-c", "%T", packed]
    kind = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    if kind in ("", "tmpfs", "ramfs"):
        pytest.skip("the files are in memory, or this is not Linux")
    shard = packed / "train-00000.bin"
    shard.read_bytes()
    assert data_loader.resident_pages(shard).all()
    assert data_loader.drop_page_cache(packed)
    assert not data_loader.resident_pages(shard).any()


def test_steps_on_several_streams_alternate_and_waiting_is_part_of_them(monkeypatch):
    clock, drawn = [0], []

    def stream(name: str, seconds: int):
        while True:
            clock[0] += seconds
            drawn.append(name)
            yield name

    def step(run):
        clock[0] += 100  # forward and backward
        next(run.batches)
        next(run.batches)  # two micro-batches

    monkeypatch.setattr(data_loader, "optimizer_step", step)
    monkeypatch.setattr(data_loader, "time", Namespace(perf_counter=lambda: clock[0]))
    times = data_loader.timed_steps(Namespace(), [stream("slow", 7), stream("fast", 1)], 3)
    assert times == [[(114, 14)] * 3, [(102, 2)] * 3]
    assert drawn == ["slow", "slow", "fast", "fast"] * (data_loader.WARM_UP_STEPS + 3)


def test_the_share_of_waiting_for_a_given_speed_of_training(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "loader_speed", lambda *_, cold: None if cold else 9_000.0)
    args = benchmark.parse_arguments(["--model_tokens_per_second", "1000"])
    row = benchmark.loader_row(args, tmp_path, {}, seq_len=64, num_workers=0)
    # 9,000 tokens take 1 second to load and 9 to train on.
    assert row["waiting_share"] == pytest.approx(0.1)
    assert "| 9 × | 10.000% |" in benchmark.loader_table(args, [row])
    assert "| n/a |" in benchmark.loader_table(args, [row])


def refused(capsys, *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(list(flags))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    *progress, last = err.splitlines()
    assert all(line.startswith("benchmarks.data: ") for line in progress)
    assert last.startswith("benchmarks.data: error: ")
    return last


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--repeat 0", "argument --repeat: whole numbers from 1 on, not '0'"),
        ("--repeat 1,,2", "argument --repeat: whole numbers from 1 on, not ''"),
        ("--num_workers 0,-1", "argument --num_workers: whole numbers from 0 on, not '-1'"),
        ("--seq_len 1", "argument --seq_len: whole numbers from 2 on, not '1'"),
        ("--shape 27m", "argument --shape: invalid choice: '27m'"),
        ("--model_tokens_per_second nan", "--model_tokens_per_second must be positive and finite"),
        ("--seconds 0", "--seconds must be positive and finite, not 0.0"),
        ("--json no/such/folder/file", "--json: no file can be written at 'no/such/folder/file'"),
        ("--second 1", "unrecognized argument --second: did you mean --seconds?"),
        ("--data no-such-file.jsonl", "no-such-file.jsonl: no such file or folder"),
    ],
)
def test_wrong_flags_end_in_one_line(flags, words, capsys):
    assert words in refused(capsys, *flags.split())


def test_text_that_cannot_be_read_ends_in_the_words_of_the_preparation(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    assert "bad.jsonl, line 2: not JSON" in refused(capsys, "--data", "bad.jsonl")
    assert os.listdir("out") == []


def test_text_too_short_for_a_sequence_ends_in_one_line(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--data", str(corpus), "--workers", "1", "--repeat", "1", "--seq_len", "1000000"]
    line = refused(capsys, *flags, "--loader_seq_lens", "16")
    assert "does not make one sequence of 1000000 tokens: use a smaller --seq_len" in line


def test_a_batch_of_more_sequences_than_there_are_ends_in_one_line(
    corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    flags = ["--data", str(corpus), "--workers", "1", "--repeat", "1", "--seq_len", "16"]
    flags += ["--loader_seq_lens", "32", "--batch_size", "9999999999999"]
    assert "--batch_size 9999999999999 is more than the" in refused(capsys, *flags)


def test_from_text_to_tables(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shape = TINY[: TINY.index("--max_seq_len")]
    monkeypatch.setitem(benchmark.SHAPES, "preset", " ".join(shape))
    flags = "--shape preset --workers 1 --repeat 1,3 --loader_seq_lens 32 --seq_len 32"
    flags += " --num_workers 0,1 --steps 2 --seconds 0.05 --json numbers.json --data"
    benchmark.main([*flags.split(), str(corpus)])
    printed = capsys.readouterr().out
    numbers = json.loads(Path("numbers.json").read_text("utf-8"))
    assert os.listdir("out") == []

    once, thrice = numbers["preparation"]
    text = "".join(json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines())
    assert (once["documents"], once["bytes"]) == (300, len(text.encode()))
    assert (thrice["documents"], thrice["bytes"]) == (900, 3 * len(text.encode()))
    for row in (once, thrice):
        phases = row["tokenizer_seconds"] + row["packing_seconds"]
        assert 0 < row["tokenizer_seconds"] < phases < row["seconds"] + 0.05
        assert row["mb_per_second"] == pytest.approx(row["bytes"] / 1e6 / row["seconds"])
        assert row["cpu_seconds"] > 0.1

    assert [row["num_workers"] for row in numbers["loader"]] == [0, 1]
    for row in numbers["loader"]:
        assert 0 < row["waiting_share"] < 1
        assert row["waiting_measured"]
        assert row["tokens_per_second"] > 0 < row["training_tokens_per_second"]

    packed, padded, longest = numbers["padding"]
    for row in (packed, padded, longest):
        expected = row["useful"] / row["positions"] * row["positions_per_second"]
        assert row["useful_per_second"] == pytest.approx(expected)
        assert 0 < row["useful_per_position"] <= 1
        assert row["useful"] + row["lost"] == packed["useful"] + packed["lost"]
    assert padded["positions_per_second"] != packed["positions_per_second"]

    assert printed.startswith(numbers["machine"] + ".\n\n    " + numbers["command"] + "\n")
    tables = [block for block in printed.split("\n\n") if block.startswith("| ")]
    assert [len(table.splitlines()) for table in tables] == [2 + 2, 2 + 2, 2 + 3]
    for table in tables:
        assert len({line.count(" | ") for line in table.splitlines()}) == 1
    assert f"| {thrice['documents']:,} |" in tables[0]
    assert f"| {packed['useful_per_position']:.4f} |" in tables[2]
