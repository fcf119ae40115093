import json
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts.teacher_logits import parse_arguments as parse_recording

from benchmarks import distillation
from benchmarks.distillation import Result, closing_line, main, row
from formats.portable import save_portable
from model import LMConfig, Transformer
from training.arguments import TrainingArguments, parse_arguments
from training.distillation_arguments import DistillationArguments

# What each kind of run comes to, in bits per byte, and how long a step of it takes.
FOUND = {
    "teacher": (1.5, 4.0),
    "alone": (2.0, 1.0),
    "distilled": (1.9, 1.6),
    "recorded": (1.91, 1.1),
}
LONGER = 1.95  # alone, with more steps
FLAGS = ["--steps", "10", "--teacher_steps", "20", "--seeds", "1,2", "--k", "5"]


def results(*values: float) -> list[Result]:
    return [Result(value, steps=600, step_seconds=0.25, n_parameters=100) for value in values]


def test_a_row_has_every_seed_and_how_far_it_is_from_another():
    shown = row("distilled", results(1.9, 1.8), 0.25, results(2.0, 2.0))
    assert shown == {
        "": "distilled",
        "steps": "600",
        "seconds": "150",
        "bits per byte, by seed": "1.9000, 1.8000",
        "mean": "1.8500",
        "against alone": "-0.1500 (-0.2000 to -0.1000)",
    }
    assert row("alone", results(2.0), 0.25)["against alone"] == ""
    assert row("teacher", results(2.0))["seconds"] == ""


def test_the_closing_line_says_both_differences_whatever_comes_out():
    said = closing_line("poems", results(2.0, 2.0), results(1.9, 2.1), results(1.8, 1.8))
    assert "**poems: distilled against alone +0.0000 (-0.1000 to +0.1000) bits per byte" in said
    assert "after as many steps, +0.2000 (+0.1000 to +0.3000) after as much time**" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--datas", "x"], "did you mean --data?"),
        (["--data", "/no/such/data"], "/no/such/data"),
        (["--seeds", "one"], "whole numbers from 0 on, not 'one'"),
        (["--steps", "0"], "whole numbers from 1 on, not '0'"),
    ],
)
def test_nonsense_is_one_line_before_anything_runs(flags, said, capsys, monkeypatch):
    monkeypatch.setattr(distillation, "train", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.distillation: error: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.fixture
def programs(tmp_path, monkeypatch) -> list:
    """The arguments of all programs that were started. They do nothing but leave what a run leaves,
    though they understand their flags as the real ones do."""
    monkeypatch.setattr(distillation, "OUT", tmp_path / "runs")
    started = []

    def run(words: list[str], **_) -> SimpleNamespace:
        if words[1] == "-m":
            started.append(parse_recording(words[3:]))
            return SimpleNamespace(returncode=0, stdout="some lines\n12 targets, 5 pieces each\n")
        kinds = {kind.program: kind for kind in (TrainingArguments, DistillationArguments)}
        args, shape = parse_arguments(words[2:], kinds[words[1]])
        started.append(args)
        folder = Path(args.out_dir) / args.run_name
        kind = next(kind for kind in FOUND if f"-{kind}-" in args.run_name)
        bits, seconds = FOUND[kind]
        bits = LONGER if kind == "alone" and args.max_steps > 10 else bits
        with torch.device("meta"):
            shapes = Transformer(LMConfig(**shape, vocab_size=400))
        weights = {name: torch.zeros(p.shape) for name, p in shapes.named_parameters()}
        save_portable(folder / "weights", shapes.config, weights)
        rows = [
            {"step": 1, "step_seconds": 90.0},
            {"step": args.max_steps, "step_seconds": seconds},
        ]
        rows.append({"step": args.max_steps, "val_bits_per_byte": bits + args.seed / 1000})
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    return started


def test_students_differ_in_their_teacher_alone(packed, programs, capsys):
    main(["--data", str(packed), *FLAGS])
    teacher, recording, *trained = programs
    paced, students = trained[:9], trained[9:]
    folder = Path(teacher.out_dir) / teacher.run_name
    assert (recording.teacher, recording.data) == (str(folder), str(packed))
    assert (recording.k, recording.temperature) == (5, students[1].temperature)
    assert [args.seed for args in students] == [1, 1, 1, 2, 2, 2, 1, 2]
    assert [args.max_steps for args in students] == [10] * 6 + [16] * 2
    taught = [(args.teacher, args.teacher_logits) for args in students]
    each = [(None, None), (str(folder), None), ("auto", str(recording.out))]
    assert taught == each * 2 + [(None, None)] * 2
    same = ("batch_size", "learning_rate", "optimizer", "lr_schedule", "data", "eval_samples")
    for args in students:
        assert [getattr(args, name) for name in same] == [getattr(teacher, name) for name in same]
    assert [(args.teacher, args.teacher_logits) for args in paced] == each * 3
    assert {(args.max_steps, args.eval_samples) for args in paced} == {(20, 16)}
    assert [args.seed for args in paced] == [0] * 3 + [1] * 3 + [2] * 3


def test_the_table_has_them_beside_each_other_and_runs_are_not_repeated(packed, programs, capsys):
    main(["--data", str(packed), *FLAGS])
    shown = capsys.readouterr()
    assert "| teacher | 20 |  | 1.5000 | 1.5000 |  |" in shown.out
    assert "| alone | 10 | 10 | 2.0010, 2.0020 | 2.0015 |  |" in shown.out
    assert "| distilled | 10 | 16 | 1.9010, 1.9020 | 1.9015 | -0.1000 (-0.1000 to -0.1000) |" in (
        shown.out
    )
    assert "| distilled, 5 pieces recorded | 10 | 11 | 1.9110, 1.9120 |" in shown.out
    assert "| alone, as long as distilled | 16 | 16 | 1.9510, 1.9520 |" in shown.out
    assert "12 targets, 5 pieces each." in shown.out
    assert "bits per byte after as many steps, -0.0500 (-0.0500 to -0.0500)" in shown.out
    n = len(programs)
    assert n == shown.err.count(" ...") == 19
    main(["--data", str(packed), *FLAGS])
    assert len(programs) == n


def test_without_a_record_there_are_no_students_of_one(packed, programs, capsys):
    main(["--data", str(packed), *FLAGS, "--k", "0"])
    assert all(isinstance(args, TrainingArguments) for args in programs)
    assert not any(args.teacher_logits for args in programs)
    assert "ecorded" not in capsys.readouterr().out


def test_a_program_that_fails_is_one_line(packed, programs, capsys, monkeypatch):
    ends = {"returncode": 2, "stdout": "a page\nteacher_logits: error: no such thing\n"}
    run = subprocess.run

    def fails(words: list[str], **options) -> SimpleNamespace:
        return SimpleNamespace(**ends) if words[1] == "-m" else run(words, **options)

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(SystemExit) as ended:
        main(["--data", str(packed), *FLAGS])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"benchmarks.distillation: error: {packed.name}-teacher-")
    assert last.endswith("-5-of-2 failed: teacher_logits: error: no such thing")


def test_the_student_is_that_of_the_first_command():
    script = (Path(__file__).parent.parent / "run_accelerate.sh").read_text(encoding="utf-8")
    assert f"shape=({distillation.STUDENT})" in script
    args, student = parse_arguments(shlex.split(f"{distillation.BATCH} {distillation.STUDENT}"))
    _, teacher = parse_arguments(shlex.split(f"{distillation.BATCH} {distillation.TEACHER}"))
    assert f"--batch_size {args.batch_size} --accumulation_steps 1" in script
    with torch.device("meta"):
        sizes = [
            Transformer(LMConfig(**shape, vocab_size=6400)).num_parameters()
            for shape in (student, teacher)
        ]
    assert 4 <= sizes[1] / sizes[0] <= 10
