"""Which run is written into and gone on from, and whether it is the same run."""

import copy
import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from model import LMConfig
from runs.checkpoint import OPTIMIZER, RANDOM, WEIGHTS, read_state, write_checkpoint
from runs.folder import RunFolder, release_locks
from training.arguments import TrainingArguments
from training.prepare import shapes_of
from training.resume import (
    StartingPoint,
    claim,
    find_starting_point,
    resumed_arguments,
    run_identity,
    say_what_changed,
    set_aside,
)
from training.stage_arguments import DistillationArguments

NOW = 1.7e9
SFT = "train_sft_accelerate.py"


@pytest.fixture(autouse=True)
def locks():
    """A lock is held for as long as its process lives."""
    yield
    release_locks()


def find(out_dir: Path, quiet: bool = False, **flags) -> StartingPoint:
    return find_starting_point(TrainingArguments(out_dir=str(out_dir), **flags), quiet)


def refused(out_dir: Path, **flags) -> str:
    with pytest.raises(UsageError) as error:
        find(out_dir, **flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def make_run(path: Path, *steps: int, age: float = 0, **state) -> Path:
    """Make a run with metrics and checkpoints, written `age` seconds before NOW.

    Args:
        state: for state.json, such as what a run that resumes must have in common.
    """
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("", encoding="utf-8")
    nothing = {WEIGHTS: {}, OPTIMIZER: {}, RANDOM: {}}
    for step in steps:
        values = {"step": step, "optimizer_step": step, "processes": 1, "identity": {}} | state
        write_checkpoint(RunFolder(path), nothing, values)
        os.utime(RunFolder(path).checkpoint(step), (NOW - age, NOW - age))
    return path


def damage_file(run: Path, step: int, name: str = WEIGHTS) -> None:
    """Flip a bit of a checkpoint's file."""
    path = RunFolder(run).checkpoint(step) / name
    contents = bytearray(path.read_bytes())
    contents[3] ^= 1
    path.write_bytes(contents)


def test_a_new_run_gets_a_folder_of_its_name_or_of_the_time(tmp_path):
    assert find(tmp_path).folder.path.name.replace("-", "").isdigit()
    start = find(tmp_path, run_name="first")
    assert (start.folder.path, start.checkpoint, start.step) == (tmp_path / "first", None, 0)
    assert list(tmp_path.iterdir()) == []
    claim(start)
    set_aside(start)
    assert [path.name for path in start.folder.path.iterdir()] == ["lock"]
    with pytest.raises(UsageError, match="in use by process"):
        claim(start)


def test_a_run_of_another_program_is_left_to_that_program(tmp_path):
    """Whatever it is told to resume."""
    run = make_run(tmp_path / "first", 10)
    (run / "settings.json").write_text("{}")  # of pretraining, as that was the only one
    for resume in (None, "auto"):
        args = DistillationArguments(out_dir=str(tmp_path), run_name="first", resume=resume)
        with pytest.raises(UsageError, match=r"holds a run of train_pretrain\S+: choose another"):
            find_starting_point(args)
    (run / "settings.json").write_text(json.dumps({"program": SFT}))
    for named in (run, run / "checkpoints" / "step-00000010"):
        said = refused(tmp_path, resume=str(named))
        assert f"first holds a run of {SFT}: choose another" in said


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for start in (find(tmp_path, run_name="file"), find(tmp_path / "file", run_name="first")):
        with pytest.raises(UsageError, match="the run folder cannot be used"):
            claim(start)


def test_auto_takes_the_checkpoint_written_last_of_all_runs_or_of_the_run_named(tmp_path):
    older = make_run(tmp_path / "older", 10, 900, age=100)
    newer = make_run(tmp_path / "newer", 9, 1000)
    (newer / "checkpoints" / "step-00002000.partial-7").mkdir()
    assert find(tmp_path, resume="auto").checkpoint == RunFolder(newer).checkpoint(1000)
    start = find(tmp_path, resume="auto", run_name="older")
    assert (start.checkpoint, start.step) == (RunFolder(older).checkpoint(900), 900)


@pytest.mark.parametrize("flags", [{}, {"run_name": "first"}])
def test_auto_with_nothing_to_resume_starts_a_run_and_says_so(tmp_path, capsys, flags):
    assert find(tmp_path / "runs", quiet=True, resume="auto", **flags).checkpoint is None
    assert capsys.readouterr().out == ""
    assert find(tmp_path / "runs", resume="auto", **flags).checkpoint is None
    assert "no checkpoint" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("here", "resume", "step"),
    [
        (".", "runs/first", 20),
        (".", "runs/first/checkpoints/step-00000010", 10),
        ("runs/first/checkpoints", "step-00000010", 10),
        ("elsewhere", "../runs/first", 20),
    ],
)
def test_the_path_of_a_run_or_of_a_checkpoint_can_be_resumed(
    tmp_path, monkeypatch, here, resume, step
):
    """Its path is relative inside the working folder and absolute elsewhere."""
    run = make_run(tmp_path / "runs" / "first", 10, 20)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / here)
    start = find(tmp_path / "others", resume=resume.format(run=run))
    expected = Path("runs/first") if here == "." else run
    assert (start.folder.path, start.checkpoint) == (expected, RunFolder(expected).checkpoint(step))


def test_auto_passes_over_damaged_checkpoints_aloud_and_sets_them_aside(tmp_path, capsys):
    run = RunFolder(make_run(tmp_path / "run", 1, 2, 3))
    damage_file(run.path, 3)
    start = find(tmp_path, run_name="run", resume="auto")
    assert (start.checkpoint, start.step) == (run.checkpoint(2), 2)
    assert f"DAMAGED CHECKPOINT {run.checkpoint(3)}: " in capsys.readouterr().out
    assert len(run.all_checkpoints()) == 3
    set_aside(start)
    assert [path.name for path in run.all_checkpoints()] == ["step-00000001", "step-00000002"]
    assert list(run.checkpoints.glob("step-00000003.aside-*"))
    for step in (1, 2):
        damage_file(run.path, step)
    message = refused(tmp_path, run_name="run", resume="auto")
    assert message.startswith(f"every checkpoint of {run.path} is damaged")


def test_a_damaged_checkpoint_that_was_named_is_refused(tmp_path):
    run = make_run(tmp_path / "run", 1, 2)
    damage_file(run, 2, OPTIMIZER)
    message = refused(tmp_path, resume=str(run))
    assert f"the checksum of {OPTIMIZER} is wrong" in message
    assert message.endswith("--resume auto takes the newest sound one")


def test_going_back_sets_the_course_not_taken_aside(tmp_path):
    run = RunFolder(make_run(tmp_path / "run", 1, 2, 3))
    run.weights.mkdir()
    set_aside(find(tmp_path, resume=str(run.checkpoint(1))))
    assert not run.weights.exists()
    assert [path.name for path in run.all_checkpoints()] == ["step-00000001"]
    assert len(list(run.path.glob("weights.aside-*"))) == 1


CONFIG = LMConfig(dim=48, n_layers=3, n_heads=4, vocab_size=400)
MINE, OTHERS = (
    SimpleNamespace(description={"tokenizer_sha256": letter * 64}, identity=letter * 16)
    for letter in "ab"
)


def saved_by(
    path: Path, args: TrainingArguments, processes: int = 1, form: str = "new", **changes
) -> StartingPoint:
    """Make the checkpoint of a run that so many processes have trained with CONFIG on MINE.

    Args:
        form: "old" is the one in which the model was among the parts of the identity.
        changes: to the shape of the model; None leaves a field out.
    """
    shape = {k: v for k, v in (CONFIG.to_dict() | changes).items() if v is not None}
    identity = run_identity(MINE, args, processes, teacher=None)
    state = {"identity": identity, "model": shape, "processes": processes}
    if form == "old":
        shape = {k: v for k, v in shape.items() if k not in ("dropout", "use_flash_attn")}
        del identity["optimizer"]
        state = {"identity": shape | identity, "processes": processes}
    run = RunFolder(make_run(path / "saved", 10, **state))
    return StartingPoint(run, run.checkpoint(10), read_state(run.checkpoint(10)))


def resumed(
    start: StartingPoint, args: TrainingArguments, config=CONFIG, data=MINE, processes=1
) -> TrainingArguments:
    identity = run_identity(data, args, processes, teacher=None)
    shapes = shapes_of(config, args)
    filled, identity = resumed_arguments(start, args, shapes, identity, processes)
    assert identity == start.state["identity"]
    return filled


def not_the_same(start: StartingPoint, *now, **how) -> list[str]:
    """Return what is said of a run that differs, in parts, without the checkpoint's name."""
    with pytest.raises(UsageError) as error:
        resumed(start, *now, **how)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"cannot resume {start.checkpoint}: ").split("; ")


FORMS = pytest.mark.parametrize("form", ["old", "new"])


@FORMS
def test_the_same_run_goes_on_however_it_computes(tmp_path, form):
    args = TrainingArguments(batch_size=4, accumulation_steps=2, learning_rate=1e-3)
    start = saved_by(tmp_path, args, form=form)
    now = dataclasses.replace(args, learning_rate=2e-3, resume="auto")
    config = dataclasses.replace(CONFIG, dropout=0.1, use_flash_attn=False)
    assert resumed(start, now, config) == now


@FORMS
def test_every_difference_is_listed_with_the_file_of_the_runs_own_flags(tmp_path, form):
    start = saved_by(tmp_path, TrainingArguments(batch_size=8), form=form)
    args = TrainingArguments(batch_size=16, seed=7, optimizer="muon", resume="auto")
    config = dataclasses.replace(CONFIG, dim=64, n_layers=4)
    assert not_the_same(start, args, config) == [
        "dim: 48 in the checkpoint, 64 now",
        "global_batch: 8 in the checkpoint, 16 now",
        "n_layers: 3 in the checkpoint, 4 now",
        "optimizer: adamw in the checkpoint, muon now",
        "seed: 42 in the checkpoint, 7 now",
        f"the flags that go on with it stand in {start.folder.settings}",
    ]


def test_other_data_and_another_tokenizer_are_refused(tmp_path):
    start = saved_by(tmp_path, TrainingArguments())
    said = not_the_same(start, TrainingArguments(data="out/data/other"), data=OTHERS)
    assert said[:2] == [
        f"data: {'a' * 16} in the checkpoint, {'b' * 16} now",
        f"tokenizer: {'a' * 16} in the checkpoint, {'b' * 16} now",
    ]


def test_another_teacher_is_another_run(tmp_path):
    args = DistillationArguments(teacher="now")
    start = saved_by(tmp_path, args)
    start.state["identity"]["teacher"] = "1" * 16
    identity = run_identity(MINE, args, 1, teacher="2" * 64)
    with pytest.raises(UsageError, match=r"teacher: 1{16} in the checkpoint, 2{16} now"):
        resumed_arguments(start, args, shapes_of(CONFIG, args), identity, 1)


@FORMS
def test_a_field_that_an_old_checkpoint_does_not_know_has_its_default(tmp_path, form):
    args = TrainingArguments()
    start = saved_by(tmp_path, args, form=form, rope_theta=None, tie_embeddings=None)
    assert resumed(start, args) == args
    said = not_the_same(start, args, dataclasses.replace(CONFIG, rope_theta=1000.0))
    assert said[0] == f"rope_theta: {LMConfig.rope_theta} in the checkpoint, 1000.0 now"


@pytest.mark.parametrize(("processes", "accumulation_steps"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_on_other_processes_the_global_batch_stays(tmp_path, processes, accumulation_steps):
    start = saved_by(tmp_path, TrainingArguments(batch_size=4), processes=6)
    args = TrainingArguments(batch_size=4, accumulation_steps=1)
    given = copy.deepcopy((args, start.state))
    expected = dataclasses.replace(args, accumulation_steps=accumulation_steps)
    assert resumed(start, args, processes=processes) == expected
    assert (args, start.state) == given
    other = dataclasses.replace(args, seed=7)
    assert not_the_same(start, other, processes=processes)[0] == "seed: 42 in the checkpoint, 7 now"


@pytest.mark.parametrize("batch_size", [4, 8])
def test_a_global_batch_that_cannot_be_made_is_refused(tmp_path, batch_size):
    start = saved_by(tmp_path, TrainingArguments(batch_size=6))
    (said,) = not_the_same(start, TrainingArguments(batch_size=batch_size), processes=2)
    made = f"global batch of 6 sequences cannot be made of --batch_size {batch_size} on 2 processes"
    assert made in said


def test_changes_since_the_stop_are_said(tmp_path, capsys):
    saved = TrainingArguments(batch_size=4, learning_rate=1e-3)
    start = saved_by(tmp_path, saved, processes=2)
    settings = {"arguments": vars(saved), "engine": "DDP"}
    start.folder.settings.write_text(json.dumps(settings), encoding="utf-8")
    asked = dataclasses.replace(saved, learning_rate=2e-3)
    args = resumed(start, asked)
    say_what_changed(start, args, processes=1, engine="none")
    assert capsys.readouterr().out.splitlines() == [
        "changed since the run was stopped: --accumulation_steps 1 → 2",
        "changed since the run was stopped: --learning_rate 0.001 → 0.002",
        "changed since the run was stopped: engine DDP → none",
        "changed since the run was stopped: processes 2 → 1, the global batch stays",
    ]
    say_what_changed(start, saved, processes=2, engine="DDP")
    assert capsys.readouterr().out == ""
