import json
import os
from pathlib import Path

import pytest

from lm.common.errors import UsageError
from lm.storage.find import data_of, find_run
from lm.storage.folder import RunFolder


def make_run(path: Path, written: float) -> RunFolder:
    """Make a run whose metrics were written at `written`, in seconds after 1970."""
    path.mkdir(parents=True)
    run = RunFolder(path)
    run.metrics.touch()
    os.utime(run.metrics, (written, written))
    return run


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "runs" / "mine", 1000).path


def test_auto_finds_the_newest_run_of_the_requested_program(run, tmp_path):
    older = make_run(tmp_path / "runs" / "older", 1)
    older.settings.write_text('{"program": "train_sft_accelerate.py"}')
    (tmp_path / "runs" / "file").touch()
    assert find_run("auto", tmp_path / "runs") == run
    assert find_run("auto", tmp_path / "runs", program="train_sft_accelerate.py") == older.path
    older.settings.write_text('{"started": 1000.5}')  # its record counts, not the time of its files
    assert find_run("auto", tmp_path / "runs") == older.path
    with pytest.raises(UsageError, match=r"no run in .* yet: start one with bash run_"):
        find_run("auto", tmp_path / "none")


def test_the_data_of_a_run_is_found_from_its_weights_and_checkpoints(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    (run / "settings.json").write_text(json.dumps({"arguments": {"data": str(data)}}))
    named = [run, run / "weights", run / "checkpoints" / "step-00000001"]
    for path in named:
        path.mkdir(parents=True, exist_ok=True)
        with pytest.raises(UsageError, match=f"training data of {path} was not found: pass --data"):
            data_of(str(path))
    data.mkdir()
    assert {data_of(str(path)) for path in named} == {data_of(f"{run}@best")} == {str(data)}
    (tmp_path / "out").mkdir()
    run.parent.rename(tmp_path / "out" / "runs")
    assert data_of("auto") == str(data)
