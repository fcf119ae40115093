"""The launches of the README: the engine, the start block, and the files of a run."""

import json
import sys

import pytest
from conftest import Trained, run, train

from lm.formats.portable import load_portable

pytestmark = pytest.mark.slow

STEPS, PROFILE_INTERVAL = 100, 50
LEARNED = 3.0  # a lower loss proves that the model has learned; an untrained model has 6.0

FLAGS = (
    f"--max_steps {STEPS} --batch_size 4 --accumulation_steps 2 --dim 64 --max_seq_len 64 "
    "--learning_rate 1e-2 --eval_interval 50 --save_interval 50 --sample_prompt sum "
    "--sample_tokens 20"
)


@pytest.fixture(scope="module")
def zero2(packed, tmp_path_factory) -> Trained:
    """A run of Method 1: ZeRO-2 in bf16 on two processes, long enough to learn."""
    path = tmp_path_factory.mktemp("zero2") / "run"
    reports = f" --log_with tensorboard --profile --profile_interval {PROFILE_INTERVAL}"
    return train("zero2", 2, packed, path, FLAGS + reports, start=run)


def test_the_start_block_names_engine_processes_precision_data_and_global_batch(zero2, packed):
    assert zero2.said("engine") == "DeepSpeed ZeRO-2, one reduction per step"
    assert zero2.said("processes").startswith("2 ")
    assert zero2.said("precision") == "bf16"
    assert zero2.said("data").startswith(str(packed))
    assert zero2.said("global batch") == (
        "16 sequences = 1,024 tokens per step (4 × 2 accumulation × 2 processes)"
    )


def test_the_model_learns(zero2):
    losses = zero2.column("loss")
    assert losses[0] == pytest.approx(6.0, abs=0.2)  # ln 400: all tokens equally likely
    assert sum(losses[-10:]) / 10 < LEARNED
    assert zero2.rows("val_loss")[-1]["val_loss"] < LEARNED
    assert zero2.column("step") == list(range(1, STEPS + 1))
    assert [row["step"] for row in zero2.rows("val_loss")] == [50, STEPS]


def test_a_run_leaves_weights_a_picture_of_losses_and_a_sample(zero2):
    assert (zero2.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (zero2.path / "sample.txt").read_text(encoding="utf-8")
    assert sample.count("\nsum") == 3
    assert sample.strip() in zero2.out
    assert str(zero2.path / "weights") in zero2.out
    for name, parameter in load_portable(zero2.path / "weights").named_parameters():
        assert parameter.equal(zero2.tensors()[name])


def test_profiling_leaves_traces_and_the_seconds_of_each_phase(zero2):
    traces = sorted(path.name for path in (zero2.path / "profile").glob("*.gz"))
    steps = (PROFILE_INTERVAL, STEPS)
    assert traces == [f"step-{step:08d}-rank{rank}.json.gz" for step in steps for rank in (0, 1)]
    for phase in ("data", "forward", "backward", "optimizer"):
        assert [row["step"] for row in zero2.rows(f"{phase}_seconds")] == [*steps]
    assert f"profile of step {PROFILE_INTERVAL}: " in zero2.out


def test_training_without_an_engine_does_not_need_deepspeed(packed, tmp_path):
    hide = "import sys; sys.modules['deepspeed'] = None"
    command = [sys.executable, "-c", f"{hide}; import train_pretrain_accelerate as p; p.main()"]
    plain = train(command, 1, packed, tmp_path / "run", "--max_steps 2", start=run)
    assert len(plain.column("loss")) == 2
    settings = json.loads((plain.path / "settings.json").read_text(encoding="utf-8"))
    assert "deepspeed" not in settings["packages"]
