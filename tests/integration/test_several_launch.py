"""train_several_accelerate.py: models side by side are, to the bit, what each is alone."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import TINY, Trained, found_by, run_warm, train

from train_several_accelerate import main
from training.engine import compilation

pytestmark = pytest.mark.slow

STEPS, SAVED = 6, 3
SHARED = (
    *(*TINY, "--max_steps", str(STEPS), "--save_interval", str(SAVED), "--eval_interval", "2"),
    *("--keep_last", "0"),
    *("--batch_size", "2", "--accumulation_steps", "2", "--sample_interval", "3"),
)
# One width for all would hide what is mixed up.
MODELS = {
    "deepspeed": {
        "divided": {"deepspeed": "configs/zero3.json", "dropout": 0.1, "learning_rate": 3e-3},
        "muon": {"deepspeed": "ds_config.json", "optimizer": "muon", "dropout": 0.2},
        "wide": {"deepspeed": "configs/zero1.json", "hidden_dim": 96, "lr_schedule": "linear"},
    },
    "ddp": {
        "large": {"hidden_dim": 96, "dropout": 0.1},
        "small": {"dropout": 0.2, "grad_clip": 0.1},
    },
}
OF_TIME = ("tokens_per_second", "step_seconds", "memory_gib", "mfu")
EACH = [(engine, name) for engine, models in MODELS.items() for name in models]


@pytest.fixture(scope="module")
def done(packed, tmp_path_factory) -> Path:
    """The folder of all runs: two processes, the models together and each alone."""
    folder = tmp_path_factory.mktemp("several")
    flags = {
        "deepspeed": [*SHARED, "--data", str(packed)],
        "ddp": [*SHARED, "--data", str(packed), "--dtype", "float32"],
    }
    (folder / "flags.json").write_text(json.dumps(flags))
    for engine, models in MODELS.items():
        (folder / engine).mkdir()
        for name, own in models.items():
            (folder / engine / f"{name}.json").write_text(json.dumps(own))
    said = found_by("several_models.py", folder, 2, tuple(MODELS))
    (folder / "said.json").write_text(json.dumps(said))
    return folder


def both(done: Path, engine: str, name: str) -> tuple[Trained, Trained]:
    """A run beside others, and alone."""
    return tuple(Trained(done / engine / how / name, "") for how in ("together", "alone"))


def without_times(run: Trained, file: str = "metrics.jsonl") -> list[dict]:
    lines = (run.path / file).read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in OF_TIME} for line in lines]


@pytest.mark.parametrize(("engine", "name"), EACH)
def test_every_number_that_is_logged_is_that_of_the_model_alone(done, engine, name):
    together, alone = both(done, engine, name)
    assert without_times(together) == without_times(alone)
    assert [row["step"] for row in together.rows()] == list(range(1, STEPS + 1))
    assert without_times(together, "samples.jsonl") == without_times(alone, "samples.jsonl")
    assert (together.path / "sample.txt").read_text() == (alone.path / "sample.txt").read_text()


@pytest.mark.parametrize(("engine", "name"), EACH)
@pytest.mark.parametrize("step", [SAVED, STEPS])
def test_checkpoints_are_those_of_the_model_alone_to_the_bit(done, engine, name, step):
    together, alone = both(done, engine, name)
    for file in ("weights", "optimizer", "random"):
        ours, theirs = (run.tensors(file, step) for run in (together, alone))
        assert ours.keys() == theirs.keys()
        assert [k for k in ours if not ours[k].equal(theirs[k])] == []
        assert ours
    ours, theirs = (
        json.loads((run.checkpoint(step) / "state.json").read_text()) for run in (together, alone)
    )
    assert ours == theirs


def test_the_models_are_on_engines_of_their_own_and_not_alike(done):
    settings = {
        name: json.loads((done / "deepspeed" / "together" / name / "settings.json").read_text())
        for name in MODELS["deepspeed"]
    }
    engines = {name: each["engine"] for name, each in settings.items()}
    assert engines == {
        "divided": "DeepSpeed ZeRO-3",
        "muon": "DeepSpeed ZeRO-2",
        "wide": "DeepSpeed ZeRO-1",
    }
    losses = [tuple(both(done, *each)[0].column("loss")) for each in EACH]
    assert len(set(losses)) == len(EACH)


@pytest.mark.parametrize("engine", MODELS)
def test_it_stops_with_all_saved_and_ends_with_one_table_and_one_report(done, engine):
    said = json.loads((done / "said.json").read_text())[engine]
    out = done / engine / "together"
    stopped = said["stopped"]
    assert f"report: {out / 'several.html'}\nstopped by the time limit after " in stopped
    assert " after step 1, saved; to go on:\n" in stopped
    assert stopped.rstrip().endswith("--resume auto")
    assert all((out / name / "checkpoints" / "step-00000001").exists() for name in MODELS[engine])
    resumed = said["resumed"]
    width = max(map(len, MODELS[engine]))
    for name in MODELS[engine]:
        assert re.search(rf"^{name:<{width}}  step {STEPS}/{STEPS}  loss \d", resumed, re.MULTILINE)
    table = resumed.rpartition("\n\nreport of all: ")[0].rpartition("\n\n")[2].splitlines()
    assert table[0].split()[:2] == ["run", "parameters"]
    assert [row.split()[0] for row in table[1:]] == sorted(MODELS[engine])
    page = (out / "several.html").read_text(encoding="utf-8")
    assert "Settings that differ" in page
    assert all(f"<th>{name}</th>" in page for name in MODELS[engine])


@pytest.mark.parametrize(("engine", "name"), EACH)
def test_memory_counts_the_others(done, engine, name):
    said = json.loads((done / "said.json").read_text())[engine]["stopped"]
    block = said[said.index(f"run folder: {done / engine / 'together' / name}\n") :]
    assert "kept by the other models, besides about 1 GiB" in block[: block.index("1 GiB") + 5]


def files(folder: Path, **models: dict) -> list[str]:
    """Words that name a file for each model."""
    words = []
    for name, flags in models.items():
        (folder / f"{name}.json").write_text(json.dumps(flags))
        words += ["--model", str(folder / f"{name}.json")]
    return words


SEVERAL = [sys.executable, "train_several_accelerate.py"]


def test_a_model_that_gives_up_leaves_the_others_as_they_are_alone(packed, tmp_path):
    flags = "--max_steps 5 --dtype float32 --dropout 0.1 --learning_rate 1e-3"
    alone = train("plain", 1, packed, tmp_path / "alone" / "good", flags)
    hopeless = {"learning_rate": 1e30, "warmup_steps": 0, "max_bad_steps": 2}
    words = files(tmp_path, hopeless=hopeless, good={"learning_rate": 1e-3})
    where = ["--data", str(packed), "--out_dir", str(tmp_path / "together")]
    shared = flags.removesuffix(" --learning_rate 1e-3").split()
    ended = run_warm([*SEVERAL, *words, *TINY, *shared, *where])
    assert ended.code == 2
    assert "hopeless  GAVE UP: 2 steps in a row had a non-finite gradient" in ended.out
    assert ended.out.rstrip().endswith("together/hopeless gave up, see above")
    good, bad = (Trained(tmp_path / "together" / name, "") for name in ("good", "hopeless"))
    assert (bad.path / "bad_samples.json").exists()
    assert without_times(good) == without_times(alone)
    for file in ("weights", "optimizer", "random"):
        ours, theirs = good.tensors(file), alone.tensors(file)
        assert [k for k in theirs if not ours[k].equal(theirs[k])] == []

    # The one that gave up is behind now, and takes nobody back.
    ended = run_warm([*SEVERAL, *words, *TINY, *shared, *where, "--resume", "auto"])
    assert ended.code == 2
    assert "together/hopeless gave up, it has no checkpoint, and" in ended.out
    assert "others went on to step 5: leave out its --model" in ended.out


@pytest.fixture
def two(packed, tmp_path):
    """Trains `first` and `second` for three steps, in this process; a file may say what differs."""

    def two(*more: str, **second) -> None:
        where = ["--data", str(packed), "--out_dir", str(tmp_path), "--keep_last", "0"]
        when = ["--max_steps", "3", "--save_interval", "1", "--sample_interval", "1"]
        main([*files(tmp_path, first={}, second=second), *TINY, *where, *when, *more])

    return two


def test_where_one_is_refused_nothing_of_the_others_changes(two, tmp_path, monkeypatch, capsys):
    first = tmp_path / "first"

    def contents() -> dict[Path, bytes]:
        there = (path for path in first.rglob("*") if path.is_file() and path.name != "lock")
        return {path: path.read_bytes() for path in there}

    with monkeypatch.context() as patch:
        patch.setattr(compilation, "obstacle", lambda device: "there is no compiler")
        with pytest.raises(SystemExit):
            two(compile="on")
    assert "cannot compile: there is no compiler" in capsys.readouterr().err
    assert contents() == {}
    two()  # as if nothing had been there
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step-00000003")  # killed between two saves
    before = contents()
    with pytest.raises(SystemExit):
        two("--resume", "auto", hidden_dim=96)
    assert "second/checkpoints/step-00000002: hidden_dim: " in capsys.readouterr().err
    assert contents() == before
    two("--resume", "auto")
    assert list((first / "checkpoints").glob("step-00000003.aside-*"))
    assert [row["step"] for row in without_times(Trained(first, ""), "samples.jsonl")] == [1, 2, 3]


class Head(io.StringIO):
    """Who reads this has seen enough when all is trained, as `head` has after some lines."""

    def flush(self) -> None:
        if re.search("second +step 3/3  validation", self.getvalue()):
            raise BrokenPipeError


def test_all_have_their_weights_and_reports_though_nobody_reads_the_end(two, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Head())
    with pytest.raises(BrokenPipeError):
        two()
    for name in ("first", "second"):
        assert (tmp_path / name / "weights").is_dir()
        assert (tmp_path / name / "report.html").is_file()
    assert (tmp_path / "several.html").is_file()
