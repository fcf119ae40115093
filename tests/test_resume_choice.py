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
from runs.folder import RunFolder
from runs.lock import release_locks
from training.arguments import TrainingArguments
from training.distillation_arguments import DistillationArguments
from training.resume import (
    StartingPoint,
    choose_run,
    describe_finished,
    differences,
    find_starting_point,
    resumed_arguments,
    run_identity,
    say_what_changed,
    set_aside,
)

NOW = 1.7e9


@pytest.fixture(autouse=True)
def locks():
    """A lock is held for as long as its process lives."""
    yield
    release_locks()


def choose(out_dir: Path, **flags) -> tuple[Path, Path | None]:
    start = choose_run(TrainingArguments(out_dir=str(out_dir), **flags))
    return start.folder.path, start.checkpoint


def refused(out_dir: Path, **flags) -> str:
    with pytest.raises(UsageError) as error:
        choose(out_dir, **flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def make_run(path: Path, *steps: int, age: float = 0, **state) -> Path:
    """A run with metrics and checkpoints, written `age` seconds before NOW.

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


def flip(path: Path, position: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[position] ^= 1
    path.write_bytes(contents)


def test_a_new_run_gets_a_folder_of_its_name(tmp_path):
    assert choose(tmp_path, run_name="first") == (tmp_path / "first", None)
    assert (tmp_path / "first").is_dir()


def test_a_run_without_a_name_is_named_after_the_time(tmp_path):
    path, _ = choose(tmp_path)
    assert path.parent == tmp_path
    assert path.name.replace("-", "").isdigit()


def test_a_new_run_never_falls_on_an_old_one(tmp_path):
    make_run(tmp_path / "first")
    message = refused(tmp_path, run_name="first")
    assert str(tmp_path / "first") in message
    assert "--resume auto" in message
    assert "another run_name" in message


@pytest.mark.parametrize("resume", [None, "auto"])
def test_nor_on_one_of_another_program_whatever_it_is_told_to_resume(tmp_path, resume):
    run = make_run(tmp_path / "first", 10)
    (run / "settings.json").write_text("{}")  # of pretraining, as that was the only one
    args = DistillationArguments(out_dir=str(tmp_path), run_name="first", resume=resume)
    with pytest.raises(
        UsageError, match=r"first holds a run of train_pretrain\S+: choose another run_name$"
    ):
        choose_run(args)


def test_a_run_of_another_program_that_is_named_goes_on_with_that_one(tmp_path):
    run = make_run(tmp_path / "first", 10)
    (run / "settings.json").write_text(json.dumps({"program": "train_sft_accelerate.py"}))
    for named in (run, run / "checkpoints" / "step-00000010"):
        said = refused(tmp_path, resume=str(named))
        assert "first holds a run of train_sft_accelerate.py: that goes on with it" in said


def test_an_empty_folder_is_no_run(tmp_path):
    (tmp_path / "first").mkdir()
    assert choose(tmp_path, run_name="first") == (tmp_path / "first", None)


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "the run folder cannot be used" in refused(tmp_path / "file", run_name="first")
    assert "the run folder cannot be used" in refused(tmp_path, run_name="file")


def test_auto_takes_the_checkpoint_written_last_of_all_runs(tmp_path):
    make_run(tmp_path / "older", 10, 900, age=100)
    newer = make_run(tmp_path / "newer", 20, 30)
    assert choose(tmp_path, resume="auto") == (newer, RunFolder(newer).checkpoint(30))


def test_auto_with_a_name_stays_with_that_run(tmp_path):
    older = make_run(tmp_path / "older", 10, age=100)
    make_run(tmp_path / "newer", 20)
    assert choose(tmp_path, resume="auto", run_name="older")[0] == older


@pytest.mark.parametrize("flags", [{}, {"run_name": "first"}])
def test_auto_with_nothing_to_resume_starts_a_run_and_says_so(tmp_path, capsys, flags):
    path, checkpoint = choose(tmp_path / "runs", resume="auto", **flags)
    assert checkpoint is None
    assert path.is_dir()
    assert "no checkpoint" in capsys.readouterr().out


def test_auto_passes_over_checkpoints_that_were_not_finished(tmp_path):
    run = make_run(tmp_path / "first", 10)
    (run / "checkpoints" / "step-00000020.partial-7").mkdir()
    assert choose(tmp_path, resume="auto")[1] == RunFolder(run).checkpoint(10)


def test_steps_are_compared_as_numbers(tmp_path):
    run = make_run(tmp_path / "first", 9, 10, 1000)
    assert choose(tmp_path, resume="auto")[1] == RunFolder(run).checkpoint(1000)


def test_the_path_of_a_run_means_its_last_checkpoint(tmp_path):
    run = make_run(tmp_path / "first", 10, 20)
    assert choose(tmp_path / "elsewhere", resume=str(run)) == (run, RunFolder(run).checkpoint(20))


def test_the_path_of_a_checkpoint_means_that_one(tmp_path):
    run = make_run(tmp_path / "first", 10, 20)
    checkpoint = RunFolder(run).checkpoint(10)
    assert choose(tmp_path / "elsewhere", resume=str(checkpoint)) == (run, checkpoint)


@pytest.mark.parametrize(
    ("here", "resume"),
    [
        (".", "runs/first"),
        (".", "{run}"),
        (".", "runs/first/checkpoints/step-00000010"),
        ("runs", "first"),
        ("runs/first/checkpoints", "step-00000010"),
        ("runs/first", "."),
        ("elsewhere", "../runs/first"),
    ],
)
def test_a_run_has_a_relative_path_inside_the_working_folder_and_an_absolute_one_elsewhere(
    tmp_path, monkeypatch, here, resume
):
    run = make_run(tmp_path / "runs" / "first", 10)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / here)
    path, checkpoint = choose(tmp_path, resume=resume.format(run=run))
    expected = {".": Path("runs/first"), "runs": Path("first")}.get(here, run)
    assert (path, checkpoint) == (expected, RunFolder(expected).checkpoint(10))
    assert path.resolve() == run
    # What follows uses its name.
    assert path.name == "first"


def test_finding_a_run_makes_no_folder_takes_no_lock_and_can_be_quiet(tmp_path, capsys):
    args = TrainingArguments(out_dir=str(tmp_path / "runs"), resume="auto", run_name="first")
    assert find_starting_point(args, quiet=True).checkpoint is None
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "runs").exists()
    run = make_run(tmp_path / "runs" / "first", 10)
    assert find_starting_point(args).checkpoint == RunFolder(run).checkpoint(10)
    assert not RunFolder(run).lock.exists()


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_path_without_a_checkpoint_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    message = refused(tmp_path, resume=str(tmp_path / name))
    assert f"--resume {tmp_path / name}" in message


def damaged(run: Path, step: int, name: str = WEIGHTS) -> Path:
    """That checkpoint, with a bit of this file flipped."""
    checkpoint = RunFolder(run).checkpoint(step)
    flip(checkpoint / name, 3)
    return checkpoint


def test_auto_takes_the_newest_that_is_sound_and_sets_the_damaged_aside(tmp_path, capsys):
    run = RunFolder(make_run(tmp_path / "run", 1, 2, 3))
    damaged(run.path, 3)
    start = choose_run(TrainingArguments(out_dir=str(tmp_path), run_name="run", resume="auto"))
    assert (start.checkpoint, start.step) == (run.checkpoint(2), 2)
    set_aside(start)
    assert f"DAMAGED CHECKPOINT {run.checkpoint(3)}" in capsys.readouterr().out
    assert [path.name for path in run.all_checkpoints()] == ["step-00000001", "step-00000002"]
    assert list(run.checkpoints.glob("step-00000003.aside-*"))


def test_auto_does_not_start_anew_where_everything_is_damaged(tmp_path):
    run = make_run(tmp_path / "run", 1)
    damaged(run, 1)
    message = refused(tmp_path, run_name="run", resume="auto")
    assert message.startswith(f"every checkpoint of {run} is damaged")


def test_a_damaged_checkpoint_that_was_named_is_refused_and_a_sound_one_offered(tmp_path):
    run = make_run(tmp_path / "run", 1, 2)
    damaged(run, 2, OPTIMIZER)
    message = refused(tmp_path, resume=str(run))
    assert f"the checksum of {OPTIMIZER} is wrong" in message
    assert message.endswith(f"the newest sound one is {RunFolder(run).checkpoint(1)}")
    damaged(run, 1)
    assert refused(tmp_path, resume=str(run)).endswith("no other is sound")


def test_going_back_sets_the_course_not_taken_aside(tmp_path):
    run = RunFolder(make_run(tmp_path / "run", 1, 2, 3))
    run.weights.mkdir()
    run.bad_samples.touch()
    start = choose_run(TrainingArguments(out_dir=str(tmp_path), resume=str(run.checkpoint(1))))
    assert start.step == 1
    assert len(run.all_checkpoints()) == 3  # a start that is refused later changes nothing
    set_aside(start)
    assert not run.weights.exists()
    assert not run.bad_samples.exists()
    assert [path.name for path in run.all_checkpoints()] == ["step-00000001"]


def test_weights_of_a_finished_run_have_their_own_step_and_fall_on_no_others(tmp_path):
    """Whatever it goes on from; the last step is logged, and may have failed to be saved."""
    run = RunFolder(make_run(tmp_path / "run", 1, 3))
    run.metrics.write_text('{"step": 1}\n{"step": 4}\n', encoding="utf-8")
    for number in range(2):  # it goes back twice, and is finished again in between
        run.weights.mkdir()
        (run.weights / "number").write_text(str(number), encoding="utf-8")
        set_aside(StartingPoint(run, run.checkpoint(1), {"step": 1}))
    kept = sorted(run.path.glob("weights-step-*"))
    assert [path.name.partition(".aside-")[0] for path in kept] == ["weights-step-00000004"] * 2
    assert [(path / "number").read_text(encoding="utf-8") for path in kept] == ["0", "1"]
    assert "." not in kept[0].name


def test_a_new_run_has_trained_no_step_and_has_nothing_to_set_aside(tmp_path):
    start = choose_run(TrainingArguments(out_dir=str(tmp_path), run_name="first"))
    assert start.step == 0
    set_aside(start)
    assert [path.name for path in start.folder.path.iterdir()] == ["lock"]


def test_a_run_that_another_holds_is_refused(tmp_path):
    choose(tmp_path, run_name="first")
    assert "in use by process" in refused(tmp_path, run_name="first")


def test_differences_name_both_sides():
    assert differences({"dim": 1, "a": 2}, {"dim": 1, "a": 3, "b": 4}) == [
        "a: 2 in the checkpoint, 3 now",
        "b: None in the checkpoint, 4 now",
    ]


CONFIG = LMConfig(dim=48, n_layers=3, n_heads=4, vocab_size=400)


def data_of(letter: str) -> SimpleNamespace:
    """A PackedDataset as far as its identity is concerned; each letter is another."""
    return SimpleNamespace(description={"tokenizer_sha256": letter * 64}, identity=letter * 16)


MINE, OTHERS = data_of("a"), data_of("b")


def saved_by(
    path: Path, args: TrainingArguments, processes: int = 1, form: str = "new", **changes
) -> StartingPoint:
    """The checkpoint of a run that so many processes have trained with CONFIG on MINE.

    Args:
        form: "old" is the one in which the model was among the parts of the identity.
        changes: to the shape of the model; None leaves a field out.
    """
    shape = {k: v for k, v in (CONFIG.to_dict() | changes).items() if v is not None}
    identity = run_identity(MINE, args, processes)
    state = {"identity": identity, "model": shape, "processes": processes}
    if form == "old":
        how = ("dropout", "use_flash_attn")
        shape = {k: v for k, v in state.pop("model").items() if k not in how}
        state["identity"] = shape | identity
    run = RunFolder(make_run(path / "saved", 10, **state))
    return StartingPoint(run, run.checkpoint(10), read_state(run.checkpoint(10)))


def not_the_same(start: StartingPoint, *now, processes: int = 1) -> str:
    """What is said of another run, without the checkpoint's name.

    Args:
        now: TrainingArguments, LMConfig and data of that run.
    """
    with pytest.raises(UsageError) as error:
        resumed_arguments(start, *now, processes)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"cannot resume {start.checkpoint}: ")


FORMS = pytest.mark.parametrize("form", ["old", "new"])


@FORMS
def test_the_same_run_goes_on_with_the_arguments_it_was_given(tmp_path, form):
    args = TrainingArguments(batch_size=4, accumulation_steps=2, learning_rate=1e-3)
    start = saved_by(tmp_path, args, form=form)
    now = dataclasses.replace(args, learning_rate=2e-3, resume="auto")
    assert resumed_arguments(start, now, CONFIG, MINE, processes=1) == now


@FORMS
def test_how_the_model_computes_may_be_another(tmp_path, form):
    args = TrainingArguments()
    start = saved_by(tmp_path, args, form=form)
    config = dataclasses.replace(CONFIG, dropout=0.1, use_flash_attn=False)
    assert resumed_arguments(start, args, config, MINE, processes=1) == args


@FORMS
def test_every_difference_is_listed(tmp_path, form):
    start = saved_by(tmp_path, TrainingArguments(batch_size=8), form=form)
    args = TrainingArguments(batch_size=16, seed=7, optimizer="muon")
    config = dataclasses.replace(CONFIG, dim=64, n_layers=4)
    assert not_the_same(start, args, config, MINE).split("; ") == [
        "dim: 48 in the checkpoint, 64 now",
        "global_batch: 8 in the checkpoint, 16 now",
        "n_layers: 3 in the checkpoint, 4 now",
        "optimizer: adamw in the checkpoint, muon now",
        "seed: 42 in the checkpoint, 7 now",
    ]


def test_where_the_run_s_own_flags_stand_is_said(tmp_path):
    start = saved_by(tmp_path, TrainingArguments())
    start.folder.settings.write_text("{}", encoding="utf-8")
    said = not_the_same(start, TrainingArguments(seed=7), CONFIG, MINE)
    assert said.endswith(f"; the flags that go on with it stand in {start.folder.settings}")


@FORMS
def test_a_checkpoint_that_names_no_optimizer_is_adamws(tmp_path, form):
    args = TrainingArguments()
    start = saved_by(tmp_path, args, form=form)
    state = json.loads((start.checkpoint / "state.json").read_text(encoding="utf-8"))
    assert state["identity"].pop("optimizer") == "adamw"
    (start.checkpoint / "state.json").write_text(json.dumps(state), encoding="utf-8")
    start = dataclasses.replace(start, state=read_state(start.checkpoint))
    assert resumed_arguments(start, args, CONFIG, MINE, processes=1) == args
    muon = dataclasses.replace(args, optimizer="muon")
    message = not_the_same(start, muon, CONFIG, MINE)
    assert message == "optimizer: adamw in the checkpoint, muon now"


def test_a_run_begun_with_muon_is_told_under_which_engines_it_goes_on(tmp_path):
    args = TrainingArguments(optimizer="muon")
    start = saved_by(tmp_path, args)
    message = not_the_same(start, TrainingArguments(), CONFIG, MINE, processes=1)
    assert message == (
        "optimizer: muon in the checkpoint, adamw now; --optimizer muon goes on with it, under "
        "every engine but ZeRO-3 and offload"
    )


@FORMS
def test_a_field_that_an_old_checkpoint_does_not_know_has_its_default(tmp_path, form):
    """Written before the field came to LMConfig, the run goes on as long as it keeps to it."""
    args = TrainingArguments()
    start = saved_by(tmp_path, args, form=form, rope_theta=None, tie_embeddings=None)
    assert resumed_arguments(start, args, CONFIG, MINE, processes=1) == args
    other = dataclasses.replace(CONFIG, rope_theta=1000.0)
    message = not_the_same(start, args, other, MINE)
    assert message == f"rope_theta: {LMConfig.rope_theta} in the checkpoint, 1000.0 now"


@FORMS
@pytest.mark.parametrize(("processes", "accumulation_steps"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_on_other_processes_the_global_batch_stays_and_what_was_given_is_not_changed(
    tmp_path, form, processes, accumulation_steps
):
    start = saved_by(tmp_path, TrainingArguments(batch_size=4), processes=6, form=form)
    args = TrainingArguments(batch_size=4, accumulation_steps=1)
    given = copy.deepcopy((args, CONFIG, MINE, start.state))
    resumed = resumed_arguments(start, args, CONFIG, MINE, processes)
    assert resumed == dataclasses.replace(args, accumulation_steps=accumulation_steps)
    assert (args, CONFIG, MINE, start.state) == given


def test_a_global_batch_that_cannot_be_made_is_refused(tmp_path):
    start = saved_by(tmp_path, TrainingArguments(batch_size=6))
    for batch_size in (4, 8):
        args = TrainingArguments(batch_size=batch_size)
        message = not_the_same(start, args, CONFIG, MINE, processes=2)
        assert f"global batch of 6 sequences cannot be made of --batch_size {batch_size}" in message
        assert "on 2 processes" in message


def test_on_other_processes_the_rest_must_be_the_same_nevertheless(tmp_path):
    start = saved_by(tmp_path, TrainingArguments(batch_size=8))
    args = TrainingArguments(batch_size=4, seed=7)
    message = not_the_same(start, args, CONFIG, MINE, processes=2)
    assert message == "seed: 42 in the checkpoint, 7 now"


def test_what_is_other_than_before_is_said(tmp_path, capsys):
    saved = TrainingArguments(batch_size=4, learning_rate=1e-3)
    start = saved_by(tmp_path, saved, processes=2)
    settings = {"arguments": vars(saved), "engine": "DDP"}
    start.folder.settings.write_text(json.dumps(settings), encoding="utf-8")
    asked = dataclasses.replace(saved, learning_rate=2e-3)
    args = resumed_arguments(start, asked, CONFIG, MINE, processes=1)
    say_what_changed(start, asked, args, processes=1, engine="none")
    assert capsys.readouterr().out.splitlines() == [
        "1 process instead of 2: --accumulation_steps is 2 now, the global batch stays",
        "changed since the run was stopped: --accumulation_steps 1 → 2",
        "changed since the run was stopped: --learning_rate 0.001 → 0.002",
        "changed since the run was stopped: engine DDP → none",
    ]
    say_what_changed(start, saved, saved, processes=2, engine="DDP")
    assert capsys.readouterr().out == ""


def test_a_finished_run_says_what_would_go_on_with_it(tmp_path):
    start = saved_by(tmp_path, TrainingArguments())
    line = describe_finished(start, 10)
    assert line.startswith(f"{start.folder.path} is finished: 10 of 10 steps")
    assert "--epochs or --max_steps" in line


MY_SETTINGS = json.dumps({"arguments": {"data": "out/data/my"}})
OTHER_CONFIG = dataclasses.replace(CONFIG, vocab_size=500)


def difference(tmp_path: Path, settings: str, **flags) -> str:
    """What is said of a run with OTHERS' data, where the one that saved has these settings."""
    args = TrainingArguments(**flags)
    start = saved_by(tmp_path, dataclasses.replace(args, batch_size=8))
    start.folder.settings.write_text(settings, encoding="utf-8")
    return not_the_same(start, args, OTHER_CONFIG, OTHERS)


def of_data(key: str) -> str:
    """The line about one of the checksums of the data."""
    saved, now = (run_identity(data, TrainingArguments(), 1) for data in (MINE, OTHERS))
    assert saved[key] != now[key]
    return f"{key}: {saved[key]} in the checkpoint, {now[key]} now"


def test_other_data_is_called_by_its_name_with_the_flag_that_goes_on(tmp_path):
    assert difference(tmp_path, MY_SETTINGS, data="out/data/builtin") == (
        "data: out/data/my in the run, out/data/builtin now; --data out/data/my goes on with it"
    )


def test_with_auto_the_other_run_is_advised_as_well(tmp_path):
    message = difference(tmp_path, MY_SETTINGS, data="out/data/builtin", resume="auto")
    assert "--data out/data/my goes on with it; --resume out/runs/NAME" in message


def test_where_more_than_the_data_differs_the_data_alone_is_not_advised(tmp_path):
    message = difference(tmp_path, MY_SETTINGS, data="out/data/builtin", batch_size=16)
    assert "data: out/data/my in the run" in message
    assert "global_batch: 8 in the checkpoint, 16 now; the flags that go on" in message
    assert "--data out" not in message


@pytest.mark.parametrize("settings", ["", "[]", '{"arguments": 1}', '{"arguments": {"data": 0}}'])
def test_data_without_a_name_is_told_by_its_checksum(tmp_path, settings):
    message = difference(tmp_path, settings, data="out/data/builtin")
    assert of_data("data") in message
    assert of_data("tokenizer") in message


def test_data_that_was_prepared_anew_in_the_same_folder_is_told_by_its_checksum(tmp_path):
    message = difference(tmp_path, MY_SETTINGS, data="out/data/../data/my/")
    assert of_data("data") in message
    assert "--data" not in message
