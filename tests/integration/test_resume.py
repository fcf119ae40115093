"""A run that was stopped and resumed ends with the same bits as a run without a stop."""

import json
import shutil
import sysconfig
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import Trained, deepspeed_file, launch_command, run_warm, train

pytestmark = pytest.mark.slow

# The data has 534 sequences. With 64 per step the first epoch ends within step 9.
STEPS, FIRST, SECOND = 12, 5, 10  # checkpoints are saved after these steps
FLAGS = (
    f"--max_steps {STEPS} --save_interval {FIRST} --eval_interval 4 --eval_samples 16 "
    "--dropout 0.1 --dtype bfloat16 --learning_rate 3e-3 --accumulation_steps 2 --keep_last 9 "
)
ENGINES = {
    "plain": ("plain", 1, ""),
    "DDP": ("ddp", 2, ""),
    "ZeRO-2": ("zero2", 2, " --sampled_softmax 4"),
    "ZeRO-3": ("configs/zero3.yaml", 2, ""),
    "ZeRO-3 on the CPU": ("configs/zero3_offload.yaml", 2, ""),
    # For ZeRO-1 in bf16 with fp32 gradients, DeepSpeed's optimizer class is not that of ZeRO-2.
    "ZeRO-1, Muon": ("zero1.json", 2, " --optimizer muon --qk_norm"),
    # `start` resumes this run with --compile auto, which keeps the choice of the first launch.
    "compiled": ("plain", 1, " --dropout 0 --compile on --sampled_softmax 4"),
}
NO_COMPILER = not (
    shutil.which("g++") and Path(sysconfig.get_paths()["include"], "Python.h").exists()
)


def start(name: str, packed: Path, path: Path, more: str = "") -> Trained:
    engine, processes, extra = ENGINES[name]
    if engine == "zero1.json":
        engine = deepspeed_file(path.parent / engine, stage=1)
    extra = extra.replace("--compile on", "") if "--resume" in more else extra
    flags = f"{FLAGS} --batch_size {32 // processes}{extra}{more}"
    return train(engine, processes, packed, path, flags)


@pytest.fixture(scope="module")
def whole(packed, tmp_path_factory):
    """Returns a run of ENGINES[name] without a stop. The first call for a name launches the run."""
    out_dir = tmp_path_factory.mktemp("whole")
    return cache(lambda name: start(name, packed, out_dir / name))


@pytest.mark.parametrize(
    ("name", "step", "resume"),
    [
        *(("plain", FIRST, "{path}"), ("plain", SECOND, "auto"), ("ZeRO-2", FIRST, "auto")),
        ("DDP", FIRST, "{path}/checkpoints/step-00000005"),
        *((name, FIRST, "auto") for name in ("ZeRO-1, Muon", "ZeRO-3", "ZeRO-3 on the CPU")),
        pytest.param(
            *("compiled", FIRST, "auto"),
            marks=[
                pytest.mark.variant,
                pytest.mark.skipif(NO_COMPILER, reason="needs a C++ compiler"),
            ],
        ),
    ],
)
def test_a_resumed_run_equals_a_whole_run_to_the_bit(
    name, step, resume, whole, packed, tmp_path, monkeypatch, path_without_compilers
):
    if name != "compiled":  # with a compiler, DeepSpeed would compile its AdamW for the CPU
        monkeypatch.setenv("PATH", path_without_compilers)
    before = whole(name)
    path = before.stopped_after(step, tmp_path / "stopped")
    (path / "checkpoints" / "step-00000099.partial-4194305").mkdir()  # left by a killed save
    resumed = start(name, packed, path, f" --resume {resume.format(path=path)}")
    assert f"starts from: step-{step:08d}" in resumed.out
    assert ("compiled: yes" in resumed.out) == (name == "compiled")
    assert before.rows()[-1]["epoch"] > 1 > before.rows()[FIRST]["epoch"]
    assert resumed.ends_as(before)
    for key in ("step", "loss", "grad_norm", "learning_rate", "epoch", "tokens"):
        assert resumed.column(key) == before.column(key)
    assert resumed.rows("val_loss")[-1] == before.rows("val_loss")[-1]
    if name == "plain":  # the random state changes, so equal ends prove that it was restored
        first, last = (before.tensors("random", step)["0.cpu"] for step in (FIRST, STEPS))
        assert not torch.equal(first, last)
    weights = resumed.tensors().values()  # the weights are fp32 although the run computes in bf16
    assert not all(torch.equal(w, w.bfloat16().float()) for w in weights)


def test_a_resumed_run_needs_no_flag_of_its_first_launch(packed, tmp_path, monkeypatch):
    """It keeps its shape, loss, rates, schedule, batch, data and threads; a typed flag decides."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    flags = f"{FLAGS} --batch_size 32 --sampled_softmax 4 --lr_schedule wsd --warmup_steps 3"
    flags += " --weight_decay 0.3 --embedding_lr_factor 2 --threads 1"
    whole = train("plain", 1, packed, tmp_path / "whole", flags)
    path = whole.stopped_after(FIRST, tmp_path / "stopped")
    resume = [*launch_command("plain", 1), "--resume"]
    resumed = Trained(path, run_warm([*resume, str(path)]).worked())
    assert "changed since the run was stopped" not in resumed.out
    assert resumed.said("device") == "CPU, 1 thread per process"
    assert resumed.ends_as(whole)
    assert resumed.repeatable() == whole.repeatable()
    ours, theirs = (
        json.loads((run.path / "settings.json").read_text())["arguments"]
        for run in (resumed, whole)
    )
    assert ours == theirs | {"resume": str(path), "run_name": "stopped"}
    again = run_warm([*resume, str(whole.checkpoint(FIRST)), "--weight_decay=0", "--threads=2"])
    changed = "changed since the run was stopped: "
    assert [line for line in again.worked().splitlines() if line.startswith(changed)] == [
        f"{changed}--threads 1 → 2",
        f"{changed}--weight_decay 0.3 → 0.0",
    ]
