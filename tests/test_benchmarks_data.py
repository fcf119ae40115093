import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY

from benchmarks import data as benchmark
from benchmarks import data_loader, data_padding, data_preparation
from benchmarks.data_loader import Training, loader_row
from benchmarks.data_padding import Positions
from benchmarks.data_preparation import Cost, preparation_row
from data.dataset import PackedDataset
from data.errors import DataError
from data.shards import DESCRIPTION_FILE, read_description
from data.tokenizer import Tokenizer

LENGTHS = np.array([5, 3, 4])  # of three documents, begin and end included: 4 + 2 + 3 targets


def test_packing_loses_the_end_of_the_stream_and_the_begins_of_documents():
    # Sequences of 4: the 12 tokens make 2, whose targets are tokens 1 to 8, of which 5 and 8 are
    # begins.
    assert data_padding.packed(LENGTHS, 4) == Positions(computed=8, useful=6, lost=3)


def test_packing_loses_no_more_than_the_rest_of_a_sequence():
    # 13 tokens and sequences of 6: targets 1 to 12, the whole stream.
    found = data_padding.packed(np.array([5, 3, 5]), 6)
    assert found == Positions(computed=12, useful=10, lost=0)


def test_what_packing_counts_is_what_the_dataset_gives(packed):
    dataset = PackedDataset(packed, "train", 32)
    targets = torch.cat([targets for _, targets in dataset])
    counts = data_padding.packed(data_padding.document_lengths(packed), 32)
    bos_id = dataset.description["bos_id"]
    assert counts.computed == len(targets)
    assert counts.useful == int((targets != bos_id).sum())


def test_padding_fills_short_documents_and_cuts_long_ones():
    # Rows of 4 tokens have 3 targets; the document of 5 loses a token.
    assert data_padding.padded(LENGTHS, 4) == Positions(computed=9, useful=8, lost=1)
    assert data_padding.padded(LENGTHS, 11) == Positions(computed=30, useful=9, lost=0)


@pytest.mark.parametrize(("batch_size", "computed"), [(1, {9}), (3, {12}), (2, {10, 11})])
def test_padding_to_the_longest_of_a_batch(batch_size, computed):
    # In batches of 2 the odd one out may be any: 4+4 and 2 or 3 positions, or 3+3 and 4.
    counts = data_padding.padded_to_longest(LENGTHS, 11, batch_size)
    assert counts.computed in computed
    assert (counts.useful, counts.lost) == (9, 0)


def test_padding_to_the_longest_cuts_as_well():
    counts = data_padding.padded_to_longest(LENGTHS, 3, 3)
    assert counts == Positions(computed=6, useful=6, lost=3)


def test_documents_are_found_in_the_shards(packed, corpus):
    texts = {json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()}
    tokenizer = Tokenizer(packed / "tokenizer.model")
    shard = np.fromfile(packed / "train-00000.bin", read_description(packed)["dtype"])
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


def cells(table: str) -> list[dict]:
    """The rows of a table by their titles."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    titles, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(titles, row, strict=True)) for row in rows]


def test_padding_is_what_packing_is_compared_with(packed):
    table = data_padding.padding_table(packed, seq_len=64, batch_size=8, speed=1000.0)
    by_packing, by_padding, by_longest = cells(table)
    assert (by_padding["way"], by_padding["against padding"]) == ("padded to 64", "1.00 ×")
    assert by_longest["way"] == "padded to the longest of 8"
    useful = float(by_packing["useful tokens per position"])
    against = useful / float(by_padding["useful tokens per position"])
    assert float(by_packing["against padding"][:-2]) == pytest.approx(against, abs=0.01)
    assert float(by_packing["useful tokens/s"]) == pytest.approx(1000 * useful, abs=1)


needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux only")
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
GRANDCHILD = "held = bytearray(b'x') * 80_000_000; print('ready', flush=True); input()"


@needs_proc
def test_memory_of_processes_below_counts():
    command = [sys.executable, "-c", CHILD, GRANDCHILD]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    memory = data_preparation.tree_memory(process.pid)
    process.communicate(b"\n")
    assert len(memory) == 2
    assert 80_000_000 < sum(pss for pss, _ in memory.values()) < 160_000_000
    assert 80_000_000 < sum(peak for _, peak in memory.values()) < 200_000_000


def test_the_peak_is_the_largest_sum_and_that_of_peaks_is_of_all_there_were(monkeypatch):
    looks = iter([{1: (50, 60)}, {1: (30, 60), 2: (40, 45)}, {2: (20, 90)}])
    monkeypatch.setattr(data_preparation, "tree_memory", lambda pid: next(looks))
    polls = iter([None, None, None, 0])
    process = SimpleNamespace(
        pid=1, poll=lambda: next(polls), wait=lambda seconds: None, kill=lambda: None
    )
    assert data_preparation.watch_memory(process) == (70, 60 + 90)


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


def test_waiting_for_data_is_part_of_a_step_and_warming_up_is_not(monkeypatch):
    clock = [0]

    def batches():
        for number in count():
            clock[0] += 1000 if number < 2 * data_loader.WARM_UP_STEPS else 7
            yield number

    def gradient(run, step):
        next(run.batches)
        next(run.batches)  # two micro-batches
        clock[0] += 80

    def update():
        clock[0] += 6

    run = SimpleNamespace(
        batches=batches(),
        update=update,
        grad_norm=0.5,
        steps=lambda: count(1),
        samples_per_step=4,
        train_set=SimpleNamespace(seq_len=25),
    )
    monkeypatch.setattr(data_loader, "compute_gradient", gradient)
    monkeypatch.setattr(data_loader, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    # 100 tokens in 2 × 7 + 80 + 6 seconds.
    assert data_loader.timed_steps(run, 3) == Training(1.0, waiting=0.14)


def test_the_share_of_waiting_for_a_given_speed_of_training(monkeypatch, tmp_path):
    monkeypatch.setattr(data_loader, "loader_speed", lambda *_, cold: None if cold else 9_000.0)
    row = loader_row(tmp_path, 8, 64, 0, 2.0, Training(1000))
    # 9,000 tokens take 1 second to load and 9 to train on.
    assert row["waiting for data, share of a step"] == "10.000%"
    assert row["loader / training"] == "9 ×"
    assert row["the same, shards not in memory"] == "n/a"
    measured = loader_row(tmp_path, 8, 64, 0, 2.0, Training(1000, waiting=0.002))
    assert measured["waiting for data, share of a step"] == "0.200%"


def test_rates_of_the_preparation_are_of_all_its_time(packed, monkeypatch):
    cost = Cost(seconds=0.004, cpu_seconds=0.002, peak=200_000_000, peaks=None)
    monkeypatch.setattr(data_preparation, "measured", lambda command: cost)
    row = preparation_row("text.txt", packed, workers=2)
    megabytes = sum(split["bytes"] for split in read_description(packed)["splits"].values()) / 1e6
    assert row["MB/s"] == f"{megabytes / 0.004:.2f}"
    assert row["MB/s per process"] == f"{megabytes / 0.008:.2f}"
    assert row["MB per CPU second"] == f"{megabytes / 0.002:.2f}"
    assert (row["peak RAM"], row["sum of peaks"]) == ("200 MB", "n/a")


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
        ("--model_tokens_per_second nan", "--model_tokens_per_second: whole numbers from 1 on"),
        ("--seconds 0", "--seconds: whole numbers from 1 on, not '0'"),
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
    flags = ["--data", str(corpus), "--repeat", "1", "--seq_len", "1000000"]
    line = refused(capsys, *flags, "--loader_seq_lens", "16")
    assert "one sequence needs max_seq_len + 1 = 1000001" in line


@pytest.mark.variant  # in pieces above
def test_from_text_to_tables(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shape = TINY[: TINY.index("--max_seq_len")]
    monkeypatch.setitem(benchmark.SHAPES, "preset", " ".join([*shape, "--compile off"]))
    flags = "--shape preset --repeat 1,3 --loader_seq_lens 32 --seq_len 32"
    flags += " --num_workers 0,1 --steps 2 --seconds 1 --data"
    benchmark.main([*flags.split(), str(corpus)])
    head, command, *blocks = capsys.readouterr().out.split("\n\n")
    assert os.listdir("out") == []
    assert "torch " in head
    assert command.strip() == f"python -m benchmarks.data {flags} {corpus}"

    preparation, loader, padding = map(cells, blocks[1::2])
    text = "".join(json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines())
    assert [row["documents"] for row in preparation] == ["300", "900"]
    assert preparation[0]["bytes each"] == f"{len(text.encode()) / 300:,.0f}"
    assert [(row["max_seq_len"], row["num_workers"]) for row in loader] == [
        ("32", "0"),
        ("32", "1"),
    ]
    assert [row["training, positions/s"] for row in padding] == [
        loader[0]["training, tokens/s"]
    ] * 3
