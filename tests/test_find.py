import json
from pathlib import Path

import pytest

from lm.common.errors import UsageError
from lm.storage.find import data_of, find_run
from lm.storage.folder import RunFolder


def make_run(path: Path, started: float, saved: str = "weights", **settings) -> Path:
    """Make a run that has logged, with an empty folder `saved`."""
    (path / saved).mkdir(parents=True)
    run = RunFolder(path)
    run.metrics.touch()
    run.settings.write_text(json.dumps({"started": started, **settings}))
    return path


def test_auto_is_the_run_that_was_started_last_and_has_weights_or_a_checkpoint(tmp_path):
    """The times of the files do not count. A report needs no weights."""
    runs = tmp_path / "runs"
    ended_early = make_run(runs / "no-weights", 4, saved="profile")
    newest = make_run(runs / "newest", 3, saved="checkpoints/step-00000001")
    tuned = make_run(runs / "tuned", 2, program="train_sft_accelerate.py")
    make_run(runs / "older", 1)
    (runs / "file").touch()
    assert find_run("auto", runs) == newest
    assert find_run("auto", runs, "train_sft_accelerate.py") == tuned
    assert find_run("auto", runs, is_wanted=lambda run: run.metrics.exists()) == ended_early
    with pytest.raises(UsageError, match=r"no run with results in .* yet: start one with bash run"):
        find_run("auto", tmp_path / "none")


def test_the_data_of_a_run_is_found_from_its_weights_and_checkpoints(tmp_path):
    data = tmp_path / "data"
    run = make_run(tmp_path / "run", 1, arguments={"data": str(data)})
    named = [run, run / "weights", run / "checkpoints" / "step-00000001"]
    for path in named:
        with pytest.raises(UsageError, match=f"training data of {path} was not found: pass --data"):
            data_of(path)
    data.mkdir()
    assert {data_of(path) for path in named} == {str(data)}
