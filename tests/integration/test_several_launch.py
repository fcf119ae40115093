"""train_several_accelerate.py: each model has the batches and losses that it would have alone."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TINY, Trained, launch_command, run_warm, train_command

import train_pretrain_accelerate
from train_several_accelerate import main

pytestmark = pytest.mark.slow

STEPS, SAVED = 6, 3
SEVERAL = "train_several_accelerate.py"
AT_ONCE = "0.0000001"  # minutes: stop after the first step
SHARED = (
    *(*TINY, "--max_steps", str(STEPS), "--save_interval", str(SAVED), "--eval_interval", "2"),
    *("--keep_last", "0", "--dtype", "float32", "--sample_interval", "3"),
    *("--batch_size", "2", "--accumulation_steps", "2"),
)
# The models differ in hidden_dim, so that tensors of the wrong model would not fit.
MODELS = {
    "ddp": {
        "narrow": {"hidden_dim": 96, "dropout": 0.1},
        "clipped": {"dropout": 0.2, "grad_clip": 0.1},
    },
    "deepspeed": {
        "divided": {"deepspeed": "configs/zero3.json", "dropout": 0.1, "learning_rate": 3e-3},
        "muon": {"deepspeed": "ds_config.json", "optimizer": "muon", "hidden_dim": 96},
    },
}
EACH = [(engine, name) for engine, models in MODELS.items() for name in models]
ALONE = [pair for pair in EACH if pair != ("ddp", "narrow")]


def files(folder: Path, **models: dict) -> list[str]:
    """Write a file of flags for each model; return the --model words of the command."""
    words = []
    for name, flags in models.items():
        (folder / f"{name}.json").write_text(json.dumps(flags))
        words += ["--model", str(folder / f"{name}.json")]
    return words


@pytest.fixture(scope="module")
def done(packed, tmp_path_factory) -> SimpleNamespace:
    """All runs are in `folder`. Two processes train the models of an engine together, then each of
    ALONE. Those with DeepSpeed are `stopped` and `resumed`: the fields are what was printed."""
    folder = tmp_path_factory.mktemp("several")

    def said_by(script: str, *flags: str) -> str:
        words = [*flags, *SHARED, "--data", str(packed)]
        # A model's "deepspeed" replaces DDP.
        return run_warm(launch_command("ddp", 2, script, *words)).worked()

    said = {}
    for engine, models in MODELS.items():
        (folder / engine).mkdir()
        words = [*files(folder / engine, **models), "--out_dir", str(folder / engine / "together")]
        if engine == "deepspeed":
            said["stopped"] = said_by(SEVERAL, *words, "--time_limit", AT_ONCE)
        said["resumed"] = said_by(SEVERAL, *words, "--resume", "auto")
    for engine, name in ALONE:
        flags = [f"--{flag}={value}" for flag, value in MODELS[engine][name].items()]
        flags += ["--out_dir", str(folder / engine / "alone"), "--run_name", name]
        said_by("train_pretrain_accelerate.py", *flags)
    return SimpleNamespace(folder=folder, **said)


@pytest.mark.parametrize(("engine", "name"), ALONE)
def test_a_model_trained_with_others_has_the_losses_of_training_alone(done, engine, name):
    together, alone = (
        Trained(done.folder / engine / how / name, "") for how in ("together", "alone")
    )
    assert together.column("step") == list(range(1, STEPS + 1))
    for key in ("tokens", "epoch", "learning_rate"):
        assert together.column(key) == alone.column(key)
    assert together.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)
    assert together.column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=1e-4)
    ours, theirs = ([row["val_loss"] for row in run.rows("val_loss")] for run in (together, alone))
    assert ours == pytest.approx(theirs, rel=1e-4)
    beside = (done.folder / engine / "together").glob("*/checkpoints")
    (steps,) = {tuple(sorted(path.name for path in each.glob("step-*"))) for each in beside}
    assert {f"step-{SAVED:08d}", f"step-{STEPS:08d}"} <= set(steps)
    ours, theirs = (run.tensors("weights", SAVED) for run in (together, alone))
    assert ours.keys() == theirs.keys()
    assert all(ours[key].allclose(theirs[key], atol=1e-4) for key in ours)


def test_each_model_has_its_own_engine_and_its_own_losses(done):
    for name, engine in {"divided": "DeepSpeed ZeRO-3", "muon": "DeepSpeed ZeRO-2"}.items():
        settings = done.folder / "deepspeed" / "together" / name / "settings.json"
        assert json.loads(settings.read_text())["engine"] == engine
    runs = (Trained(done.folder / engine / "together" / name, "") for engine, name in EACH)
    assert len({tuple(run.column("loss")) for run in runs}) == len(EACH)


def test_a_stop_saves_all_models_and_the_end_writes_one_report(done):
    out = done.folder / "deepspeed" / "together"
    assert "stopped by the time limit after step 1, saved; to go on:\n" in done.stopped
    assert done.stopped.rstrip().endswith("--resume auto")
    assert f"\nreport of all runs: {out / 'several.html'}" in done.resumed
    page = (out / "several.html").read_text(encoding="utf-8")
    for name in MODELS["deepspeed"]:
        assert re.search(rf"^{name}  step {STEPS}/{STEPS}  loss \d", done.resumed, re.MULTILINE)
        assert (out / name / "checkpoints" / "step-00000001").is_dir()
        assert (out / name / "weights").is_dir()
        assert name in page


def test_the_files_of_a_model_do_not_change_if_another_cannot_resume(packed, tmp_path, capsys):
    first = tmp_path / "first"

    def two(*more: str, **second) -> None:
        """Train both models for three steps, in this process."""
        where = ["--data", str(packed), "--out_dir", str(tmp_path), "--keep_last", "0"]
        when = ["--max_steps", "3", "--save_interval", "1", "--sample_interval", "1"]
        main([*files(tmp_path, first={}, second=second), *TINY, *where, *when, *more])

    def contents() -> dict[Path, bytes]:
        there = (path for path in first.rglob("*") if path.is_file() and path.name != "lock")
        return {path: path.read_bytes() for path in there}

    two()
    shutil.rmtree(tmp_path / "second/checkpoints/step-00000003")  # as if killed before this save
    before = contents()
    with pytest.raises(SystemExit):
        two("--resume", "auto", hidden_dim=96)
    assert "second/checkpoints/step-00000002: hidden_dim: " in capsys.readouterr().err
    assert contents() == before
    two("--resume", "auto")
    assert list((first / "checkpoints").glob("step-00000003.aside-*"))
    assert [row["step"] for row in Trained(first, "").samples()] == [1, 2, 3]
    # A model can be resumed alone.
    more = f"--resume {first} --max_steps 4 --keep_last 0"
    train_pretrain_accelerate.main(train_command([], 1, packed, first, more))
    assert Trained(first, "").column("step") == [1, 2, 3, 4]
