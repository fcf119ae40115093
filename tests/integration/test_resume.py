"""A run that was stopped and resumed ends with the same bits as a run without a stop."""

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from conftest import Trained, launch_command, run_warm, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow

# The data has 534 sequences. With 64 per step the first epoch ends within step 9.
STEPS, FIRST, SECOND = 12, 5, 10  # checkpoints are saved after these steps
FLAGS = (
    f"--max_steps {STEPS} --save_interval {FIRST} --eval_interval 4 --eval_samples 16 "
    "--dropout 0.1 --dtype bfloat16 --learning_rate 3e-3 --accumulation_steps 2 --keep_last 9 "
)
COMPILED = "--dropout 0 --compile on --sampled_softmax 4"
NO_COMPILER = not (
    shutil.which("g++") and Path(sysconfig.get_paths()["include"], "Python.h").exists()
)


@pytest.mark.parametrize(
    ("engine", "processes", "more", "step", "resume"),
    [
        ("ddp", 2, "", FIRST, "{path}/checkpoints/step-00000005"),
        # Only one of the processes has a sequence to validate. Under ZeRO-3 none can compute alone.
        ("configs/zero3_offload.yaml", 2, "--eval_samples 1", SECOND, "auto"),
        # For ZeRO-1 in bf16 with fp32 gradients, DeepSpeed's optimizer class is not that of ZeRO-2.
        ("configs/zero1.yaml", 2, "--optimizer muon --qk_norm", FIRST, "{path}"),
        # The run is resumed with --compile auto, which keeps the choice of the first launch.
        pytest.param(
            *("plain", 1, COMPILED, FIRST, "auto"),
            marks=[
                pytest.mark.variant,
                pytest.mark.skipif(NO_COMPILER, reason="needs a C++ compiler (g++)"),
            ],
        ),
    ],
)
def test_a_resumed_run_equals_a_whole_run_to_the_bit(
    engine, processes, more, step, resume, packed, tmp_path, monkeypatch, path_without_compilers
):
    """The other engines: test_reliability.py kills and stops their runs."""
    if more != COMPILED:  # with a compiler, DeepSpeed would compile its AdamW for the CPU
        monkeypatch.setenv("PATH", path_without_compilers)
    flags = f"{FLAGS} --batch_size {32 // processes} {more}"
    whole = train(engine, processes, packed, tmp_path / "whole", flags)
    path = whole.stopped_after(step, tmp_path / "stopped")
    (path / "checkpoints" / "step-00000099.partial-4194305").mkdir()  # left by a killed save
    flags = f"{flags.replace('--compile on', '')} --resume {resume.format(path=path)}"
    resumed = train(engine, processes, packed, path, flags)
    assert f"starts from: step-{step:08d}" in resumed.out
    assert ("compiled: yes" in resumed.out) == (more == COMPILED)
    assert whole.rows()[-1]["epoch"] > 1 > whole.rows()[FIRST]["epoch"]
    assert resumed.ends_as(whole)
    for key in ("step", "loss", "grad_norm", "learning_rate", "epoch", "tokens"):
        assert resumed.column(key) == whole.column(key)
    last = whole.rows("val_loss")[-1]
    assert resumed.rows("val_loss")[-1] == last
    assert last["val_samples"] == (1 if "--eval_samples 1" in more else 16)
    # The random state changes, so equal ends prove that it was restored.
    first, last = (whole.tensors("random", step)["0.cpu"] for step in (FIRST, STEPS))
    assert torch.equal(first, last) == (more == COMPILED)
    weights = resumed.tensors().values()  # the weights are fp32 although the run computes in bf16
    assert not all(torch.equal(w, w.bfloat16().float()) for w in weights)


OTHER_FLAGS = f"{FLAGS} --batch_size 32 --sampled_softmax 4 --lr_schedule wsd --warmup_steps 3"
OTHER_FLAGS += " --weight_decay 0.3 --embedding_lr_factor 2 --threads 1"
SAMPLES = "--sample_interval 2 --sample_prompt sum --log_with tensorboard"
SAMPLES += " --profile --profile_interval 4"


@pytest.fixture(scope="module")
def resumed(packed, tmp_path_factory) -> Trained:
    """A run with samples that reached the last step, lost the checkpoints after step FIRST, and was
    resumed without any flag. Its `settings` are those of the first launch."""
    path = tmp_path_factory.mktemp("resumed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        first = train("plain", 1, packed, path, f"{OTHER_FLAGS} {SAMPLES}")
        for checkpoint in (path / "checkpoints").glob("step-*"):
            if int(checkpoint.name[5:]) > FIRST:
                shutil.rmtree(checkpoint)
        first.settings = json.loads((path / "settings.json").read_text())
        first.out = run_warm([*launch_command("plain", 1), "--resume", str(path)]).worked()
    return first


def test_a_resumed_run_needs_no_flag_and_writing_samples_changes_no_bit(resumed, packed, tmp_path):
    """It keeps its shape, loss, rates, schedule, batch, data and threads."""
    whole = train("plain", 1, packed, tmp_path / "whole", OTHER_FLAGS)
    assert "starts from: step-00000005" in resumed.out
    assert "changed since the run was stopped" not in resumed.out
    assert resumed.said("device") == "CPU, 1 thread per process"
    assert resumed.ends_as(whole)
    for key in ("step", "loss", "grad_norm", "learning_rate", "epoch", "tokens"):
        assert resumed.column(key) == whole.column(key)
    assert resumed.rows("val_loss") == whole.rows("val_loss")
    ours = json.loads((resumed.path / "settings.json").read_text())["arguments"]
    assert ours == resumed.settings["arguments"] | {"resume": str(resumed.path)}
    assert not (whole.path / "samples.jsonl").exists()


def test_a_resumed_run_logs_each_sample_and_each_loss_once(resumed):
    assert [row["step"] for row in resumed.samples()] == list(range(2, STEPS + 1, 2))
    events = EventAccumulator(str(resumed.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    wanted = {f"train/{name}" for name in ("loss", "learning_rate", "grad_norm", "memory_gib")}
    wanted |= {"train/tokens", "train/tokens_per_second", "val/loss", "val/bits_per_byte"}
    wanted |= {f"profile/{phase}_seconds" for phase in ("data", "forward", "backward", "optimizer")}
    assert wanted <= set(events.Tags()["scalars"])
    losses = events.Scalars("train/loss")
    assert [each.step for each in losses] == resumed.column("step") == list(range(1, STEPS + 1))
    assert [each.value for each in losses] == pytest.approx(resumed.column("loss"), rel=1e-6)


def test_a_finished_run_leaves_its_report_and_says_what_to_try_next(resumed):
    page = (resumed.path / "report.html").read_text(encoding="utf-8")
    assert ">finished</td>" in page
    assert f"report:     {resumed.path / 'report.html'}" in resumed.out
    for script in ("generate", "evaluate", "export_hf"):
        assert f"python -m scripts.{script} {resumed.path}" in resumed.out
