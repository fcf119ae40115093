"""Each benchmark runs at a tiny size and prints its table; ratios of speeds are correct."""

import json
import re
import sys

import pytest
from conftest import REPOSITORY, run

from benchmarks import engines, throughput
from benchmarks.contenders import Contender
from benchmarks.throughput import Result, closing_line
from benchmarks.work import Work

STEP = "--rounds 1 --steps 2 --warmup_steps 0 --keep_compile_cache"
LITTLE = "--max_seq_len 32 --batch_size 2 --compile off"
MODEL = "--dim 32 --n_layers 1 --n_heads 2"


@pytest.fixture
def rows(tmp_path):
    """Runs a benchmark in an empty folder; returns the cells of all tables without header rows."""

    def rows(name: str, *flags) -> list[list[str]]:
        command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, flags)]
        ended = run(command, cwd=tmp_path, PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1")
        assert ended.code == 0, ended.out
        tables = re.findall(r"\| ---.*\n((?:\|.*\n)+)", ended.out)
        return [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()]

    return rows


@pytest.mark.slow
def test_throughput_prints_a_row_for_each_contender(rows, packed):
    who = "ours-eager,ours-eager+muon,transformers-eager"
    flags = ["--sizes", "test", "--data", packed, *STEP.split(), "--contenders", who]
    assert [row[0] for row in rows("throughput", *flags)] == who.split(",")


@pytest.mark.slow
@pytest.mark.variant
def test_throughput_prints_the_number_of_processes(rows, packed):
    who = "ours-eager,ours-ddp-eager,ours-zero2-eager"
    flags = ["--sizes", "test", "--data", packed, *STEP.split(), "--contenders", who]
    assert [row[1] for row in rows("throughput", *flags, "--processes", "2")] == ["1", "2", "2"]


@pytest.mark.slow
def test_the_generation_benchmark_gets_the_text_of_transformers(rows):
    flags = ["--sizes", "test", "--dtypes", "float32", "--batch_sizes", "2", "--rounds", "1"]
    (row,) = rows("generation", *flags)
    assert (row[:3], row[-1]) == (["test", "float32", "2"], "yes")  # yes: the same text


@pytest.mark.slow
def test_the_data_benchmark_measures_preparing_and_loading(rows, corpus):
    flags = ["--data", corpus, "--loader_seq_lens", "32", "--num_workers", "0", "--seconds", "1"]
    prepared, loaded = rows("data", *flags, "--model_tokens_per_second", "1000")
    assert (prepared[1], loaded[:2]) == ("300", ["32", "0"])  # documents


@pytest.mark.slow
@pytest.mark.variant
def test_the_engines_have_equal_losses_and_send_the_expected_bytes(rows, packed):
    flags = "--dim 128 --n_layers 4 --n_heads 4 --max_seq_len 32 --steps 4 --engines ddp,zero2"
    found = rows("engines", *flags.split(), "--data", packed)
    assert [row[0] for row in found] == ["DDP", "DeepSpeed ZeRO-2"]
    assert found[0][2] == found[1][2]  # the last loss
    for row in found if engines.counts_traffic() else ():
        assert float(row[6]) == pytest.approx(float(row[7].split()[0]), rel=0.1)


@pytest.mark.slow
@pytest.mark.variant
def test_the_distillation_benchmark_trains_students_alone_and_distilled(rows, packed):
    flags = ["--data", packed, "--student", MODEL, "--teacher", MODEL, "--batch", LITTLE]
    found = rows("distillation", *flags, "--steps", "10", "--teacher_steps", "10", "--seeds", "1")
    assert [row[0] or row[1] for row in found][1:3] == ["alone", "distilled"]


@pytest.mark.slow
def test_the_sft_benchmark_measures_this_project(rows, tmp_path, packed):
    words = ["train_pretrain_accelerate.py", *MODEL.split(), *LITTLE.split(), "--max_steps", "2"]
    words += ["--data", packed, "--out_dir", tmp_path / "out/runs", "--log_with", "none"]
    assert run([sys.executable, *map(str, words)]).code == 0
    line = json.dumps({"prompt": "1?", "response": "2"}) + "\n"
    (tmp_path / "chat.jsonl").write_text(line * 8)
    flags = "--conversations chat.jsonl --batch_size 2 --steps 2 --rounds 1"
    (row,) = rows("sft", *flags.split())
    assert row[0] == "this project"


def test_ratios_are_taken_within_a_round_against_the_fastest_peer(packed):
    work = Work(dim=64, n_layers=2, batch_size=2, seq_len=50, data=str(packed))
    ours = Result(Contender("ours", True), work, 1.0, 2**30, {1: 1.0, 2: 2.0, 3: 4.0})
    peer = Result(Contender("litgpt", True), work, 1.0, 2**30, {2: 4.0, 3: 16.0})
    assert ours.speeds() == [100, 50, 25]
    assert peer.ratios(ours) == [0.5, 0.25]
    said = closing_line("26m", [ours, peer])
    assert said.startswith("26m, ours / fastest peer: 2.67 (ours-compiled / litgpt-compiled)")


STUB = """#!/bin/sh
echo "table of $*"
case "$*" in *"$FAILING"*) echo "no room" >&2; exit 3;; esac
"""


@pytest.mark.parametrize(("failing", "code"), [("nothing", 0), ("-m pytest", 1)])
def test_the_gpu_script_reports_every_part_and_every_failure(tmp_path, failing, code):
    (stub := tmp_path / "python").write_text(STUB)
    stub.chmod(0o755)
    command = ["bash", "benchmarks/gpu.sh", str(tmp_path / "report")]
    assert run(command, PYTHON=str(stub), FAILING=failing).code == code
    report = (tmp_path / "report/gpu.md").read_text()
    assert (report.count("\n# "), report.count("FAILED (exit code 3)")) == (11, code)
    for options in re.findall("table of -m benchmarks.throughput (.*)", report):
        assert throughput.parse_options(options.split()).contenders
