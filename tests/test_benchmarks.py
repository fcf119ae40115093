"""Each benchmark runs at a tiny size and prints its table; and what decides who is how fast."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, Finished, run

from benchmarks import engines, throughput
from benchmarks.contenders import Contender, Team, TeamError, all_contenders, select
from benchmarks.sft import Program, race
from benchmarks.throughput import Result, SizeReport, closing_line, size_table
from benchmarks.work import Work
from common.errors import UsageError

STEP = ["--rounds", "1", "--steps", "2", "--warmup_steps", "0", "--keep_compile_cache"]
LITTLE = "--max_seq_len 32 --batch_size 2 --compile off"
MODEL = "--dim 32 --n_layers 1 --n_heads 2"


def start(tmp_path: Path, name: str, *flags) -> Finished:
    """Run a benchmark in a folder of its own."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, flags)]
    return run(command, cwd=tmp_path, PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1")


def rows_of(ended: Finished) -> list[list[str]]:
    """Return the cells of all tables, without their titles."""
    assert ended.code == 0, ended.out
    lines = [line for line in ended.out.splitlines() if line.startswith("|")]
    ruled = [i for i, line in enumerate(lines) if line.startswith("| ---")]
    assert ruled, ended.out
    rows = [line.strip("| ").split(" | ") for line in lines]
    return [row for i, row in enumerate(rows) if i not in ruled and i + 1 not in ruled]


@pytest.mark.slow
def test_throughput_compares_contenders_and_names_those_that_fail(tmp_path, packed):
    pytest.importorskip("transformers")
    who = "ours-eager,ours-eager+muon,transformers-eager,litgpt-eager"
    ended = start(
        tmp_path, "throughput", "--sizes", "test", "--data", packed, *STEP, "--contenders", who
    )
    rows = rows_of(ended)
    assert [row[0] for row in rows][:3] == ["ours-eager", "ours-eager+muon", "transformers-eager"]
    assert "- litgpt-eager: ModuleNotFoundError" in ended.out or rows[3][0] == "litgpt-eager"
    assert "**test, ours / fastest peer: " in ended.out
    assert "STOPPED" not in ended.out


@pytest.mark.slow
@pytest.mark.variant
def test_throughput_has_engines_of_two_processes(tmp_path, packed):
    who = "ours-eager,ours-ddp-eager,ours-zero2-eager"
    flags = ["--sizes", "test", "--processes", "2", "--data", packed, *STEP, "--contenders", who]
    rows = rows_of(start(tmp_path, "throughput", *flags))
    assert [row[:2] for row in rows] == [
        *(["ours-eager", "1"], ["ours-ddp-eager", "2"], ["ours-zero2-eager", "2"])
    ]


@pytest.mark.slow
def test_generation(tmp_path):
    pytest.importorskip("transformers")
    flags = ["--sizes", "test", "--dtypes", "float32", "--batch_sizes", "2", "--rounds", "1"]
    (row,) = rows_of(start(tmp_path, "generation", *flags))
    assert row[:3] == ["test", "float32", "2"]
    assert row[-1] == "yes"  # the same text as transformers'


@pytest.mark.slow
def test_data(tmp_path, corpus):
    flags = ["--data", corpus, "--loader_seq_lens", "32", "--num_workers", "0", "--seconds", "1"]
    ended = start(tmp_path, "data", *flags, "--model_tokens_per_second", "1000")
    prepared, loaded = rows_of(ended)
    assert prepared[1] == "300"  # documents
    assert loaded[:2] == ["32", "0"]
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_waiting_for_data_is_a_share_of_real_steps(packed):
    flags = [*MODEL.split(), *LITTLE.split(), "--data", str(packed)]
    code = f"from benchmarks.data import timed_steps; print('TIMED', timed_steps({flags}, 2))"
    ended = run([sys.executable, "-c", code])
    assert ended.code == 0, ended.out
    speed, waiting = re.search(r"TIMED \(([\d.]+), ([\d.e-]+)\)", ended.out).groups()
    assert float(speed) > 0
    assert 0 < float(waiting) < 1


@pytest.mark.slow
@pytest.mark.variant
def test_engines_agree_and_send_what_is_expected(tmp_path, packed):
    flags = ["--dim", "128", "--n_layers", "4", "--n_heads", "4", "--max_seq_len", "32"]
    flags += ["--steps", "4", "--data", packed, "--engines", "ddp,zero2"]
    rows = rows_of(start(tmp_path, "engines", *flags))
    assert [row[0] for row in rows] == ["DDP", "DeepSpeed ZeRO-2"]
    assert rows[0][2] == rows[1][2]  # the last loss
    if engines.counts_traffic():
        for row in rows:
            assert float(row[6]) == pytest.approx(float(row[7].split()[0]), rel=0.1)


@pytest.mark.slow
@pytest.mark.variant
def test_distillation(tmp_path, packed):
    flags = ["--data", packed, "--student", MODEL, "--teacher", MODEL, "--batch", LITTLE]
    flags += ["--steps", "10", "--teacher_steps", "10", "--seeds", "1"]
    rows = rows_of(start(tmp_path, "distillation", *flags))
    kinds = ["teacher", "alone", "distilled", "alone, as long as distilled"]
    assert [row[0] or row[1] for row in rows] == kinds


@pytest.mark.slow
def test_sft_of_this_project_alone(tmp_path, packed):
    words = ["train_pretrain_accelerate.py", *MODEL.split(), *LITTLE.split(), "--max_steps", "2"]
    words += ["--data", packed, "--out_dir", tmp_path / "out/runs", "--log_with", "none"]
    pretrained = run([sys.executable, *map(str, words)])
    assert pretrained.code == 0, pretrained.out
    (tmp_path / "chat.jsonl").write_text(
        "".join(
            json.dumps({"conversations": [turn("user", i), turn("assistant", i)]}) + "\n"
            for i in range(8)
        )
    )
    flags = ["--conversations", "chat.jsonl", "--batch_size", "2", "--steps", "2", "--rounds", "1"]
    (row,) = rows_of(start(tmp_path, "sft", *flags))
    assert row[0] == "this project"


def turn(role: str, i: int) -> dict:
    return {"role": role, "content": f"{i}"}


def test_nobody_is_left_of_a_contender_that_fails(tmp_path):
    work = Work(dim=64, n_layers=2, batch_size=2, seq_len=32, data=str(tmp_path / "none"))
    team = Team(Contender("ours", compiled=False), work, tmp_path, fresh_compile=False)
    (process,) = team._ranks.values()
    with pytest.raises(TeamError, match="none"):
        team.take(0)
    assert not process.is_alive()
    assert "scripts.prepare_data" in team.last_words()


def test_programs_take_turns_of_whole_passes_and_the_first_does_not_count(tmp_path):
    code = "import itertools\nfor n in itertools.count(1): print(f'step {n}/9  loss {n}.5  lr 1')"
    racing = [
        Program(name, [sys.executable, "-c", code], tmp_path, dict(os.environ), tmp_path / name)
        for name in ("ours", "peer")
    ]
    race(racing, steps=2, rounds=2)
    assert [len(program.seconds) for program in racing] == [2, 2]
    assert racing[0].loss == "6.5"  # three passes of two steps
    assert all(program.process.returncode is not None for program in racing)
    words = [sys.executable, "-c", "exit('out of luck')"]
    badly = Program("badly", words, tmp_path, {}, tmp_path / "badly.log")
    with pytest.raises(UsageError, match=r"badly ended with exit code 1, .*: out of luck"):
        race([badly], steps=1, rounds=1)


def result(work: Work, seconds: dict[int, float], *who, **settings) -> Result:
    return Result(Contender(*who, **settings), work, 1.0, 2**30, seconds)


def test_ratios_are_taken_within_a_round_and_only_single_processes_meet_the_peers(packed):
    work = Work(dim=64, n_layers=2, batch_size=2, seq_len=50, data=str(packed))
    ours = result(work, {1: 1.0, 2: 2.0, 3: 4.0}, "ours", True)
    two = result(work, {1: 0.5}, "ours", True, "ddp", processes=2)
    peer = result(work, {2: 4.0, 3: 16.0}, "litgpt", True)
    same = result(work, {3: 5.0}, "litgpt", True, variant="allocator")
    assert ours.speeds() == [100, 50, 25]
    assert two.ratios(ours) == [4]
    assert peer.ratios(ours) == [0.5, 0.25]
    said = closing_line("26m", [ours, two, peer, same])
    assert said == (
        "26m, ours / fastest peer: 2.67 (ours-compiled / litgpt-compiled), "
        "same allocator 1.25 (litgpt-compiled+allocator)"
    )
    missing = {"transformers-eager": "no time left"}
    results = {each.contender: each for each in (ours, two, peer)}
    report = SizeReport("26m", work, results, missing, [1e12], rounds=3)
    text = size_table(report)
    assert "| litgpt-compiled | 1 | 16 (6 to 25) | 0.375 (0.250 to 0.500) |" in text
    assert "STOPPED in round 3" in text
    assert "- transformers-eager: no time left" in text


def test_groups_of_contenders():
    found = all_contenders(processes=2, has_gpu=False)
    assert [each.name for each in select(found, "muon")] == [
        "ours-compiled+muon",
        "ours-eager+muon",
    ]
    assert len(select(found, "peers")) == 8
    assert not any(each.variant in ("blocks", "muon") for each in select(found, "all"))
    with pytest.raises(UsageError, match="'theirs' is none of all, blocks"):
        select(found, "theirs")


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("throughput", ["--sizes", "huge"], "'huge' is none of 3m"),
        ("throughput", ["--steps", "two"], "--steps: invalid int value: 'two'"),
        ("throughput", ["--size", "26m"], "did you mean --sizes?"),
        ("engines", ["--engines", "zero9"], "'zero9' is none of ddp"),
        ("data", ["--data", "/no/such"], "/no/such"),
        ("distillation", ["--data", "/no/such"], "/no/such"),
        ("sft", ["--run", "/no/such"], "/no/such"),
    ],
)
def test_nonsense_is_one_line(name, flags, said, capsys):
    module = __import__(f"benchmarks.{name}", fromlist=["main"])
    with pytest.raises(SystemExit) as ended:
        module.main(flags)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"benchmarks.{name}: error: ")
    assert said in error


STUB = """#!/bin/sh
echo "table of $*"
echo "progress of $2" >&2
case "$*" in *"$FAILING"*) echo "no room" >&2; exit 3;; esac
"""


@pytest.mark.skipif(not shutil.which("timeout"), reason="no coreutils")
@pytest.mark.parametrize(
    ("parts", "failing", "expected"),
    [([], "nothing", (0, 11, 0)), ([], "-m pytest", (1, 11, 1)), (["muon"], "muon", (1, 1, 1))],
)
def test_gpu_script_reports_every_part_and_every_failure(tmp_path, parts, failing, expected):
    (stub := tmp_path / "python").write_text(STUB)
    stub.chmod(0o755)
    command = ["bash", "benchmarks/gpu.sh", str(tmp_path / "report"), *parts]
    ended = run(command, PYTHON=str(stub), FAILING=failing)
    report = (tmp_path / "report/gpu.md").read_text()
    found = (ended.code, report.count("\n# "), report.count("FAILED (exit code 3): progress of"))
    assert found == expected
    asked = "table of -m benchmarks.throughput "
    commands = [line.removeprefix(asked) for line in report.splitlines() if line.startswith(asked)]
    for command in commands:
        options = throughput.parse_options(command.split())
        assert options.contenders[0].name == "ours-compiled" or "muon" in command
