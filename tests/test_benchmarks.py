"""Four benchmarks print tables at a tiny size; ratios and the report of gpu.py are correct."""

import math
import os
import re
import signal
import subprocess
import sys
import zipfile

import psutil
import pytest
import torch
from conftest import REPOSITORY, run, wait_for

from benchmarks import engines, gpu, head_to_head, sampling, throughput
from benchmarks.ours import OurStep
from benchmarks.turns import Turn, read_rows, record, table_rows
from lm.common.errors import UsageError

STEP = "--rounds 1 --steps 2 --warmup_steps 0 --dtype float32"
LITTLE = "--max_seq_len 32 --batch_size 2 --compile off"
MODEL = "--dim 32 --n_layers 1 --n_heads 2"


@pytest.fixture
def rows(tmp_path):
    """Runs a benchmark in an empty folder; returns the cells of all tables without header rows."""

    def rows(name: str, *flags) -> list[list[str]]:
        command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, flags)]
        ended = run(command, cwd=tmp_path, PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1")
        tables = re.findall(r"\| ---.*\n((?:\|.*\n)+)", ended.worked())
        return [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()]

    return rows


@pytest.mark.slow
def test_throughput_prints_and_records_each_contender_and_traces_ours(rows, packed, tmp_path):
    who = ["ours-eager", "ours-zero2-eager+uncoalesced", "transformers-eager"]
    flags = ["--sizes", "test", "--data", packed, *STEP.split(), "--contenders", *who]
    flags += ["--rows", "rows.jsonl", "--traces", "traces.zip", "--accumulation_steps", "2"]
    assert [row[0] for row in rows("throughput", *flags)] == who
    recorded = read_rows(tmp_path / "rows.jsonl")
    turns = [row["contender"] for kind, row in recorded if kind == "turn"]
    # Each takes one turn alone, then one round: the first alone, the others with the first.
    assert turns == [who[0]] * 2 + [who[1], who[0], who[1]] + [who[2], who[0], who[2]]
    profiled = [row for kind, row in recorded if kind == "profile"]
    assert [row["contender"] for row in profiled] == who[:2]
    for row in profiled:
        phases = ("data", "forward", "backward", "optimizer")
        assert sum(row[phase] for phase in phases) == pytest.approx(row["step"], abs=1e-3)
    with zipfile.ZipFile(tmp_path / "traces.zip") as archive:
        assert len(archive.namelist()) == 2


@pytest.mark.slow
@pytest.mark.variant
def test_throughput_prints_the_number_of_processes(rows, packed):
    who = ["ours-eager", "ours-ddp-eager", "ours-zero2-eager"]
    flags = ["--sizes", "test", "--data", packed, *STEP.split(), "--contenders", *who]
    assert [row[1] for row in rows("throughput", *flags, "--processes", "2")] == ["1", "2", "2"]


@pytest.mark.slow
def test_the_generation_benchmark_gets_the_text_of_transformers(rows):
    flags = ["--sizes", "test", "--dtypes", "float32", "--batch_sizes", "2", "--rounds", "1"]
    (row,) = rows("generation", *flags)
    assert (row[:3], row[-1]) == (["test", "float32", "2"], "yes")  # yes: the same text


@pytest.mark.slow
@pytest.mark.variant
def test_the_engines_have_equal_losses_and_send_the_expected_bytes(rows, packed):
    flags = "--dim 128 --n_layers 4 --n_heads 4 --max_seq_len 32 --steps 4 --engines ddp zero2"
    found = rows("engines", *flags.split(), "--data", packed)
    assert [row[0] for row in found] == ["DDP", "DeepSpeed ZeRO-2"]
    assert found[0][2] == found[1][2]  # the last loss
    for row in found if engines.counts_traffic() else ():
        assert float(row[6]) == pytest.approx(float(row[7].split()[0]), rel=0.1)


@pytest.mark.slow
def test_variants_of_the_recipe_are_trained_with_each_seed(rows, packed):
    flags = ["--shape", "1x32", "--steps", "2", "--variants", "--compile off"]
    flags += ["optimizer=adamw --compile off", "--seeds", "1", "2"]
    reference, adamw = rows("variants", "--data", packed, *flags)
    assert [reference[0], adamw[0]] == ["`--compile off`", "`optimizer=adamw --compile off`"]
    by_seed = [float(value) for value in adamw[3].split(", ")]
    assert len({*by_seed}) == 2
    assert float(adamw[4]) == pytest.approx(sum(by_seed) / 2, abs=1e-4)
    assert float(adamw[5]) == pytest.approx(float(adamw[4]) - float(reference[4]), abs=2e-4)


# Simulates machines without a network. On the first, processes wait without end. On the second, the
# first process is killed, and its child goes on.
FAILING = """
import sys
from contextlib import contextmanager
from benchmarks import engines
fork = "import os, sys, time; child = os.fork(); "
wait = f"time.sleep(600)  # {sys.argv[1]}"
kill = f"child and os.kill(os.getpid(), 9); {wait}"
machines = [([sys.executable, "-c", fork + then], "") for then in (wait, kill)]
engines.simulated_machines = contextmanager(lambda count: (machines for _ in "1"))
flags = "--engines ddp --limit 1 --processes 2 --data"
engines.main([*flags.split(), sys.argv[2]])
"""


@pytest.mark.slow
def test_if_a_simulated_machine_fails_the_processes_of_all_are_killed(packed, tmp_path):
    ended = run([sys.executable, "-c", FAILING, str(tmp_path), str(packed)])
    assert ended.error(engines.PROGRAM).endswith(": ddp ended by signal 9")
    assert str(tmp_path) not in running_commands()


def test_a_loop_is_a_token_or_a_pair_that_stands_eight_times_in_a_row():
    assert sampling.has_loop([1, *[5] * 8])
    assert sampling.has_loop([1, *[5, 6] * 8, 2])
    assert not sampling.has_loop([*[5] * 7, *[6] * 7, *[1, 2] * 7])
    assert sampling.repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert sampling.repeated_share([1, 2]) is None


@pytest.mark.slow
@pytest.mark.variant
def test_the_distillation_benchmark_trains_students_alone_and_distilled(rows, packed):
    flags = ["--data", packed, "--student", MODEL, "--teacher", MODEL, "--batch", LITTLE]
    found = rows("distillation", *flags, "--steps", "10", "--teacher_steps", "10", "--seeds", "1")
    assert [row[0] for row in found][1:3] == ["alone", "distilled"]


def turn(contender: str, number: int, speed: float) -> Turn:
    return Turn(
        size="26m",
        accumulation_steps=1,
        contender=contender,
        processes=1,
        round=number,
        tokens_per_second=speed,
        flops_per_second=speed * 1e9,
        peak_flops=1e12,
        product_flops=5e11,
        peak_bytes=2**30,
        expected_bytes=2**31,
        first_step_seconds=1.0,
    )


def test_ratios_are_taken_within_a_round_and_shares_of_the_peak_are_medians():
    speeds = {"ours": {1: 100, 3: 50, 4: 25}, "litgpt": {2: 900, 3: 25, 4: 6.25}}
    turns = [turn(who, n, speed) for who, own in speeds.items() for n, speed in own.items()]
    ours, peer = table_rows(turns)
    assert (ours["ratio"], peer["ratio"]) == ("1", "0.375 (0.250 to 0.500)")
    assert (ours["tokens/s"], ours["MFU"], ours["of products"]) == (
        "50 (25 to 100)",
        "5.0%",
        "10.0%",
    )
    assert (ours["memory"], ours["expected"]) == ("1.00 GiB", "2.00 GiB")
    (alone,) = table_rows(turns[:1])
    assert alone["ratio"] == "1"


def test_a_gradient_that_was_not_finite_is_found_after_the_turn():
    step = object.__new__(OurStep)
    step._loss, step._norms = torch.tensor(2.0), [1.0, torch.tensor(3.0)]
    assert step.loss() == 2.0
    step._norms = [1.0, torch.tensor(math.nan), torch.tensor(3.0)]
    with pytest.raises(FloatingPointError, match="nan"):
        step.loss()


@pytest.mark.parametrize(
    ("wanted", "elapsed", "given"), [(60, 10, 60), (60, 500, 25), (60, 522, 0)]
)
def test_a_part_gets_at_most_the_time_left_and_none_if_that_is_too_short(wanted, elapsed, given):
    assert gpu.time_limit(wanted, elapsed) == given


@pytest.mark.parametrize("tiny", [False, True])
def test_the_gpu_script_measures_contenders_that_exist(tmp_path, tiny):
    commands = [part.command for part in gpu.all_parts(tmp_path, tiny)]
    measured = [command for command in commands if command[2] == throughput.PROGRAM]
    assert [len(throughput.parse_options(c[3:]).contenders) for c in measured] == [3, 2, 3, 2]


def test_the_gpu_script_runs_all_gpu_tests():
    tests = (REPOSITORY / "tests").rglob("test_*.py")
    files = [path for path in tests if "pytest.mark." + "gpu" in read(path)]
    assert {str(path.relative_to(REPOSITORY)) for path in files} == set(gpu.TESTS.split()[-2:])


def test_the_report_quotes_the_result_of_tests_and_of_the_first_command():
    tests = "[gw0] [ 50%] PASSED tests/a.py::test_a \n[gw1] [100%] FAILED tests/a.py::test_b[1] \n"
    assert gpu.summary(tests, "failed, exit code 1") == "1 passed; 1 failed; tests/a.py::test_b[1]"
    steps = "  recipe: 2 min\nstep 1/2  loss 3  5 tokens/s\nstep 2/2  loss 2  9 tokens/s\n'a|b'\n"
    quoted = "recipe: 2 min; step 2/2  loss 2  9 tokens/s"
    assert gpu.summary(steps, gpu.PASSED) == quoted
    assert gpu.summary(steps, gpu.LATE) == rf"{quoted}; 'a\|b'"


# A program that runs parts. The last part starts a process in a session of its own, and hangs.
HANGING = """
import sys, time
from pathlib import Path
from benchmarks.gpu import Part, run_parts
from lm.common.errors import stop_in_order
stop_in_order()
out, seconds = Path(sys.argv[1]), float(sys.argv[2])
before = f"import pathlib; assert 'passed' {{}} pathlib.Path({str(out / 'gpu.md')!r}).read_text()"
hang = f"import os, time; os.fork() or os.setsid(); time.sleep(600)  # {out}"
parts = [
    Part("start", 99, [sys.executable, "-c", before.format("not in")]),
    Part("second", 99, [sys.executable, "-c", before.format("in")]),
    Part("broken", 99, [sys.executable, "-c", "raise SystemExit('no such thing')"]),
    Part("hangs", seconds, [sys.executable, "-c", hang]),
]
assert not run_parts(parts, out, time.monotonic())
"""


def read(path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def last_rows(folder) -> dict[str, tuple[str, str]]:
    """Return the last result and note of each part."""
    found = [row for kind, row in read_rows(folder / gpu.ROWS) if kind == "part"]
    return {row["part"]: (row["result"], row["note"]) for row in found}


EARLIER = {
    "start": ("passed", ""),
    "second": ("passed", ""),
    "broken": ("failed, exit code 1", "no such thing"),
}


@pytest.mark.slow
def test_a_part_that_hangs_is_killed_with_all_its_processes(tmp_path):
    run([sys.executable, "-c", HANGING, str(tmp_path), "6"]).worked()
    assert last_rows(tmp_path) == EARLIER | {"hangs": ("out of time", "")}
    assert "| hangs | out of time |" in (tmp_path / gpu.REPORT).read_text()
    assert str(tmp_path) not in running_commands()


def running_commands() -> str:
    processes = psutil.process_iter(["cmdline"])
    return "\n".join(" ".join(each.info["cmdline"] or []) for each in processes)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_report_of_an_interrupted_program_has_all_results_so_far(tmp_path, number):
    command = [sys.executable, "-c", HANGING, str(tmp_path), "600"]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": "."})
    wait_for(lambda: "| hangs | running |" in read(tmp_path / gpu.REPORT), process)
    process.send_signal(number)
    assert process.wait() != 0
    assert (rows := last_rows(tmp_path)) == EARLIER | {"hangs": ("stopped", "")}
    assert all(f"| {part} | {rows[part][0]} |" in read(tmp_path / gpu.REPORT) for part in rows)
    assert str(tmp_path) not in running_commands()


def test_an_incomplete_last_row_is_left_out(tmp_path):
    record(path := tmp_path / "rows", "note", {"text": "first"})
    with open(path, "a") as file:
        file.write('{"kind": "note", "te')
    assert read_rows(path) == [("note", {"text": "first"})]


def test_the_report_compares_only_turns_of_the_same_part(tmp_path):
    rows = [("note", {"text": "an H100"})]
    for part, speed in (("104m × 1", 100.0), ("transformers", 50.0)):
        rows.append(("part", {"part": part, "result": "running", "seconds": 0, "note": ""}))
        rows += [("turn", vars(turn(who, 1, speed * n))) for n, who in ((1, "ours"), (2, "other"))]
    table = [line for line in gpu.report(rows).splitlines() if line.startswith("| 26m")]
    cells = [line.strip("| ").split(" | ") for line in table]
    assert [(row[2], row[5]) for row in cells] == [
        ("ours", "1"),
        ("other", "2.000 (2.000 to 2.000)"),
    ] * 2


def test_every_eleventh_document_is_held_out(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(f'{{"text": "{n}\\r"}}\n' for n in range(1, 24)))
    train, held_out = head_to_head.split(str(file))
    assert held_out == ["11", "22"]
    assert train == [str(n) for n in range(1, 24) if n not in (11, 22)]


@pytest.mark.parametrize("start", [[4], [4, 4]])
def test_each_character_is_scored_once_after_the_characters_before_it(start):
    """The model is sure that "b" follows "a" and so on; it gives each other next id 1/5."""
    longest = 0

    def logits(ids):
        nonlocal longest
        longest = max(longest, ids.shape[1])
        sure = torch.nn.functional.one_hot((ids + 1) % 5, 5) * 100.0
        return torch.where((ids < 3).unsqueeze(-1), sure, torch.zeros(5))

    model = head_to_head.Reader(1, 6, start, lambda text: ["abcd".index(c) for c in text], logits)
    for text, guesses in (("a", 1), ("abcd", 1), ("abcd" * 2 + "abc", 3), ("dddddddd", 8)):
        bits = head_to_head.bits_per_byte(model, [text])
        assert bits == pytest.approx(guesses * math.log2(5) / len(text))
    assert longest == 6


def test_nanogpt_gets_the_steps_that_fit_into_95_percent_of_the_time():
    assert head_to_head.affordable_steps(lambda steps: 10 + 0.25 * steps, 200) == 720
    assert head_to_head.affordable_steps(lambda steps: 10 + 0.25 * steps, 1) == 20
    with pytest.raises(UsageError, match="are the cores free"):
        head_to_head.affordable_steps(lambda steps: 10, 200)
