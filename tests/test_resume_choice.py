import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from runs.checkpoint import OPTIMIZER, RANDOM, STATE, WEIGHTS, _write_manifest
from runs.folder import RunFolder
from training.arguments import TrainingArguments
from training.resume import Choice, choose_run, compare, find_run, reconcile

ALONE = SimpleNamespace(is_main_process=True, num_processes=1)


def choose(out_dir: Path, **flags) -> tuple[Path, Path | None]:
    choice = choose_run(TrainingArguments(out_dir=str(out_dir), **flags), ALONE)
    return choice.folder.path, choice.checkpoint


def refused(out_dir: Path, **flags) -> str:
    with pytest.raises(UsageError) as error:
        choose(out_dir, **flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def make_run(path: Path, *steps: int, age: float = 0, identity: dict | None = None) -> Path:
    """A run with metrics and checkpoints, the newest of them written `age` seconds ago."""
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("", encoding="utf-8")
    for step in steps:
        checkpoint = RunFolder(path).checkpoint(step)
        checkpoint.mkdir(parents=True)
        for name in (WEIGHTS, OPTIMIZER, RANDOM):
            (checkpoint / name).touch()
        state = {"step": step, "optimizer_step": step, "processes": 1, "identity": identity or {}}
        (checkpoint / STATE).write_text(json.dumps(state), encoding="utf-8")
        _write_manifest(checkpoint)
        now = os.stat(path).st_mtime
        os.utime(checkpoint, (now - age, now - age))
    return path


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
    assert "--run_name" in message


def test_an_empty_folder_is_no_run(tmp_path):
    (tmp_path / "first").mkdir()
    assert choose(tmp_path, run_name="first") == (tmp_path / "first", None)


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot make the run folder" in refused(tmp_path / "file", run_name="first")
    assert "cannot make the run folder" in refused(tmp_path, run_name="file")


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
    (run / "checkpoints" / "step-00000020.partial").mkdir()
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
    assert find_run(args, quiet=True).checkpoint is None
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "runs").exists()
    run = make_run(tmp_path / "runs" / "first", 10)
    assert find_run(args).checkpoint == RunFolder(run).checkpoint(10)
    assert not RunFolder(run).lock.exists()


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_path_without_a_checkpoint_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    message = refused(tmp_path, resume=str(tmp_path / name))
    assert f"--resume {tmp_path / name}" in message


def test_a_checkpoint_that_names_no_optimizer_is_adamws(tmp_path):
    state = {"processes": 1, "identity": {"global_batch": 8}}
    choice = Choice(RunFolder(tmp_path), tmp_path / "step-00000001", state)
    engine, args = SimpleNamespace(accelerator=ALONE), TrainingArguments()
    reconcile(choice, engine, args, {"global_batch": 8, "optimizer": "adamw"})
    with pytest.raises(UsageError, match="optimizer: adamw in the checkpoint, muon now"):
        reconcile(choice, engine, args, {"global_batch": 8, "optimizer": "muon"})


SAVED = {"data": "1" * 16, "tokenizer": "2" * 16, "vocab_size": 400, "global_batch": 8}
OTHER = {"data": "3" * 16, "tokenizer": "4" * 16, "vocab_size": 500}


def difference(tmp_path: Path, settings: str, now: dict, **flags) -> str:
    """What `compare` says of a run that has these settings.json, without the checkpoint's name."""
    folder = RunFolder(tmp_path)
    folder.settings.write_text(settings, encoding="utf-8")
    choice = Choice(folder, tmp_path / "step-1", {"processes": 1, "identity": SAVED})
    identity = SAVED | {"optimizer": "adamw"} | now
    with pytest.raises(UsageError) as error:
        compare(choice, TrainingArguments(**flags), identity, processes=1)
    return str(error.value).removeprefix(f"cannot resume {choice.checkpoint}: ")


MY_SETTINGS = json.dumps({"arguments": {"data": "out/data/my"}})


def test_other_data_is_called_by_its_name_with_the_flag_that_goes_on(tmp_path):
    assert difference(tmp_path, MY_SETTINGS, OTHER, data="out/data/builtin") == (
        "data: out/data/my in the run, out/data/builtin now; --data out/data/my goes on with it"
    )


def test_with_auto_the_other_run_is_advised_as_well(tmp_path):
    message = difference(tmp_path, MY_SETTINGS, OTHER, data="out/data/builtin", resume="auto")
    assert "--data out/data/my goes on with it; --resume out/runs/NAME" in message


def test_where_more_than_the_data_differs_the_data_alone_is_not_advised(tmp_path):
    now = OTHER | {"global_batch": 16}
    message = difference(tmp_path, MY_SETTINGS, now, data="out/data/builtin")
    assert "data: out/data/my in the run" in message
    assert message.endswith("global_batch: 8 in the checkpoint, 16 now")


@pytest.mark.parametrize("settings", ["", "[]", '{"arguments": 1}', '{"arguments": {"data": 0}}'])
def test_data_without_a_name_is_told_by_its_checksum(tmp_path, settings):
    message = difference(tmp_path, settings, OTHER, data="out/data/builtin")
    assert f"data: {'1' * 16} in the checkpoint, {'3' * 16} now" in message
    assert f"tokenizer: {'2' * 16} in the checkpoint, {'4' * 16} now" in message


def test_data_that_was_prepared_anew_in_the_same_folder_is_told_by_its_checksum(tmp_path):
    message = difference(tmp_path, MY_SETTINGS, OTHER, data="out/data/../data/my/")
    assert f"data: {'1' * 16} in the checkpoint, {'3' * 16} now" in message
    assert "--data" not in message
