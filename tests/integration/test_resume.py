"""A run that was stopped and resumed ends with the same bits as one that was not."""

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from conftest import (
    TINY,
    Trained,
    deepspeed_command,
    deepspeed_file,
    launch_command,
    run_warm,
    train,
)

pytestmark = pytest.mark.slow

# 534 sequences: with 64 per step the first epoch ends within step 9.
STEPS, FIRST, SECOND = 12, 5, 10
ENGINES = {
    "plain": ("plain", 1),
    "DDP": ("ddp", 2),
    "ZeRO-2": ("zero2", 2),
    "ZeRO-3 offloaded": ("configs/zero3_offload.yaml", 2),
}
FLAGS = (
    f"--max_steps {STEPS} --save_interval {FIRST} --eval_interval 4 --eval_samples 16 "
    "--dropout 0.1 --dtype bfloat16 --learning_rate 3e-3 --accumulation_steps 2 --keep_last 9"
)


def batch_flag(processes: int) -> str:
    return f" --batch_size {32 // processes}"


@pytest.fixture(scope="module")
def whole(packed, tmp_path_factory):
    """Runs without a stop, by engine, each launched once."""
    out_dir, done = tmp_path_factory.mktemp("whole"), {}

    def get(name: str) -> Trained:
        if name not in done:
            engine, processes = ENGINES[name]
            flags = FLAGS + batch_flag(processes)
            done[name] = train(engine, processes, packed, out_dir / name, flags)
        return done[name]

    return get


def stopped_after(step: int, run: Trained, path: Path) -> Path:
    """What a run killed after this step's checkpoint has left behind."""
    shutil.copytree(run.checkpoint(step), path / "checkpoints" / run.checkpoint(step).name)
    shutil.copy(run.path / "metrics.jsonl", path)
    (path / "checkpoints" / "step-00000099.partial-4194305").mkdir()
    return path


def assert_equal_bits(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert different == []


def resume(name: str, packed: Path, path: Path) -> Trained:
    engine, processes = ENGINES[name]
    return train(engine, processes, packed, path, FLAGS + batch_flag(processes) + " --resume auto")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("plain", FIRST), ("plain", SECOND), ("DDP", FIRST)),
        ("ZeRO-2", FIRST),
        # Of test_engines.py, which resumes each engine after another step.
        pytest.param("ZeRO-3 offloaded", FIRST, marks=pytest.mark.variant),
    ],
)
def test_resuming_continues_bit_for_bit(name, step, whole, packed, tmp_path):
    before = whole(name)
    resumed = resume(name, packed, stopped_after(step, before, tmp_path / "stopped"))
    assert f"starts from: step-{step:08d}" in resumed.out
    assert before.rows()[-1]["epoch"] > 1 > before.rows()[FIRST]["epoch"]
    for file in ("weights", "optimizer", "random"):
        assert_equal_bits(before.tensors(file), resumed.tensors(file))
    for key in ("step", "loss", "grad_norm", "learning_rate", "epoch", "tokens"):
        assert resumed.column(key) == before.column(key)
    assert resumed.rows("val_loss")[-1] == before.rows("val_loss")[-1]


@pytest.mark.variant  # of test_equivalence, in bf16
def test_muon_resumes_bit_for_bit_under_zero_1_in_bf16(packed, tmp_path):
    """With fp32 gradients, which is a class of DeepSpeed's own; the others: test_equivalence.py."""
    command = deepspeed_command(deepspeed_file(tmp_path / "ds.json", stage=1), 2)
    flags = FLAGS + batch_flag(2) + " --optimizer muon"
    before = train(command, 2, packed, tmp_path / "whole", flags)
    assert "engine: DeepSpeed ZeRO-1" in before.out
    path = stopped_after(FIRST, before, tmp_path / "stopped")
    resumed = train(command, 2, packed, path, flags + f" --resume {path}")
    assert resumed.column("loss") == before.column("loss")
    for file in ("weights", "optimizer", "random"):
        assert_equal_bits(before.tensors(file), resumed.tensors(file))


@pytest.mark.variant  # of tests/test_compilation.py and the resumes above
@pytest.mark.skipif(
    not (shutil.which("g++") and Path(sysconfig.get_paths()["include"], "Python.h").exists()),
    reason="needs a C++ compiler and Python's headers",
)
def test_a_compiled_run_resumes_compiled_and_bit_for_bit(packed, tmp_path):
    flags = FLAGS.replace("--dropout 0.1", "--dropout 0") + batch_flag(1)
    before = train("plain", 1, packed, tmp_path / "whole", flags + " --compile on")
    assert "compiled: yes" in before.out
    path = stopped_after(FIRST, before, tmp_path / "stopped")
    # "auto" would leave so short a run alone, but keeps to what the run did.
    resumed = train("plain", 1, packed, path, flags + f" --resume {path}")
    assert "compiled: yes" in resumed.out
    assert resumed.column("loss") == before.column("loss")
    for file in ("weights", "optimizer"):
        assert_equal_bits(before.tensors(file), resumed.tensors(file))


def test_dropout_was_at_work(whole):
    """Otherwise equal bits would prove nothing about the state of random generators."""
    run = whole("plain")
    first, last = run.tensors("random", FIRST), run.tensors("random", STEPS)
    assert not torch.equal(first["0.cpu"], last["0.cpu"])


def test_the_path_of_a_run_and_of_a_checkpoint_can_be_resumed(whole, packed, tmp_path):
    before = whole("plain")
    path = stopped_after(SECOND, before, tmp_path / "stopped")
    for given in (path, path / "checkpoints" / f"step-{SECOND:08d}"):
        resumed = train("plain", 1, packed, path, FLAGS + batch_flag(1) + f" --resume {given}")
        assert f"starts from: step-{SECOND:08d}" in resumed.out
        assert_equal_bits(before.tensors(), resumed.tensors())
        shutil.rmtree(path / "checkpoints" / f"step-{STEPS:08d}")


def test_auto_with_nothing_to_resume_starts_a_run(packed, tmp_path):
    path = tmp_path / "runs" / "new"
    started = train("plain", 1, packed, path, "--max_steps 1 --resume auto")
    assert "no checkpoint" in started.out
    assert started.column("step") == [1]


def refused(packed: Path, flags: list[str]) -> str:
    """The one line that a start which cannot work ends in."""
    ended = run_warm([*launch_command("plain", 1), *TINY, "--data", str(packed), *flags])
    assert ended.code == 2, ended.out
    assert "Traceback" not in ended.out
    (line,) = [line for line in ended.out.splitlines() if "error:" in line]
    return line


@pytest.mark.parametrize("file", ["weights.safetensors", "random.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_refused(file, whole, packed, tmp_path):
    path = stopped_after(FIRST, whole("plain"), tmp_path / "stopped")
    damaged = path / "checkpoints" / f"step-{FIRST:08d}" / file
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    line = refused(packed, ["--resume", str(path)])
    assert str(damaged.parent) in line


def test_a_checkpoint_of_another_shape_is_refused_with_both_shapes(whole, packed, tmp_path):
    path = stopped_after(FIRST, whole("plain"), tmp_path / "stopped")
    line = refused(packed, ["--resume", str(path), "--dim", "64", "--n_layers", "3"])
    assert "dim: 32 in the checkpoint, 64 now" in line
    assert "n_layers: 2 in the checkpoint, 3 now" in line


def test_a_checkpoint_of_another_optimizer_is_refused(whole, packed, tmp_path):
    path = stopped_after(FIRST, whole("plain"), tmp_path / "stopped")
    line = refused(packed, ["--resume", str(path), "--optimizer", "muon", "--batch_size", "64"])
    assert "optimizer: adamw in the checkpoint, muon now" in line
