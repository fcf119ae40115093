import json
import os
from pathlib import Path

import pytest

from common.errors import UsageError
from runs.find import data_of, find_run, newest_run
from runs.folder import RunFolder


def make_run(path: Path, written: float | None) -> RunFolder:
    """A run whose metrics were written so many seconds after 1970; None: it has none."""
    path.mkdir(parents=True)
    run = RunFolder(path)
    if written is not None:
        run.metrics.touch()
        os.utime(run.metrics, (written, written))
    return run


def metrics_of(run: RunFolder) -> Path:
    return run.metrics


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "runs" / "mine", 1000).path


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_newest_run_is_the_one_with_the_youngest_sign_of_life(tmp_path, order):
    runs = [make_run(tmp_path / name, age) for name, age in (("a", 10), ("b", 30), ("c", 20))]
    assert newest_run([runs[i] for i in order], metrics_of) is runs[1]


def test_when_its_folder_was_made_does_not_matter(tmp_path):
    older, newer = make_run(tmp_path / "older", 20), make_run(tmp_path / "newer", 10)
    os.utime(older.path, (1, 1))
    assert newest_run([older, newer], metrics_of) is older


def test_a_run_without_a_sign_of_life_is_passed_over(tmp_path):
    """There is no such path, or the file that it names is not there."""
    silent, missing = make_run(tmp_path / "silent", 20), make_run(tmp_path / "missing", None)
    run = make_run(tmp_path / "run", 10)
    signs = {silent: None, missing: missing.metrics, run: run.metrics}
    assert newest_run(list(signs), signs.get) is run


def test_where_no_run_has_a_sign_of_life_there_is_no_newest(tmp_path):
    runs = [make_run(tmp_path / name, None) for name in "ab"]
    assert newest_run(runs, metrics_of) is None
    assert newest_run(runs, lambda run: None) is None
    assert newest_run([], metrics_of) is None


def test_auto_is_the_run_written_to_last(run, tmp_path):
    make_run(tmp_path / "runs" / "older", 1)
    make_run(tmp_path / "runs" / "empty", None)
    (tmp_path / "runs" / "file").touch()
    assert find_run("auto", tmp_path / "runs") == run


@pytest.mark.parametrize("folder", ["", "runs", "runs/empty"])
def test_auto_without_any_run_says_how_to_get_one(tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    with pytest.raises(UsageError, match=r"no run in .* yet: bash run_accelerate.sh"):
        find_run("auto", tmp_path / "runs")


def test_a_path_is_taken_as_it_is_wherever_it_is(run, tmp_path):
    assert find_run(str(run), tmp_path / "elsewhere") == run
    with pytest.raises(UsageError, match="is a file: give a run folder"):
        find_run(str(run / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("typed", "meant"), [("atuo", "auto"), ("mime", "runs/mine"), ("out/mines", "runs/mine")]
)
def test_a_name_that_is_nearly_one_is_answered_with_it(run, tmp_path, monkeypatch, typed, meant):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        find_run(typed, Path("runs"))
    assert str(error.value) == f"{typed}: no such folder: did you mean '{meant}'?"
    with pytest.raises(UsageError, match=r"zebra: no such folder$"):
        find_run("zebra", Path("runs"))


def test_the_data_of_a_run_is_that_of_its_weights_and_checkpoints_too(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    settings = {"arguments": {"data": str(data)}}
    (run / "settings.json").write_text(json.dumps(settings))
    named = [run, run / "weights", run / "checkpoints" / "step-00000001"]
    for path in named:
        path.mkdir(parents=True, exist_ok=True)
        with pytest.raises(
            UsageError, match=f"what {path} was trained on is not here: pass --data"
        ):
            data_of(str(path))
    data.mkdir()
    assert {data_of(str(path)) for path in named} == {data_of(f"{run}@best")} == {str(data)}
    with pytest.raises(UsageError, match="there is no run in"):
        data_of("auto")
    (tmp_path / "out").mkdir()
    run.parent.rename(tmp_path / "out" / "runs")
    assert data_of("auto") == str(data)


def test_weights_that_belong_to_no_run_do_not_say_what_they_were_trained_on(tmp_path):
    (tmp_path / "weights").mkdir()
    with pytest.raises(UsageError, match="pass --data"):
        data_of(str(tmp_path / "weights"))
