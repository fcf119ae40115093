"""The launches of the README: which engine they start, what it says, what a run leaves."""

import gzip
import json
import re

import pytest
import torch
from conftest import LAUNCH, Trained, run, train, train_command

from data.tokenizer import Tokenizer
from formats.portable import load_portable

pytestmark = pytest.mark.slow

STEPS, PROFILE_INTERVAL = 100, 50
# Seeds 1, 2 and 42 ended at 1.4 to 1.8, and at 1.6 to 1.9 in validation; 6.0 is where they begin.
LEARNED = 3.0
PHASES = ("data", "forward", "backward", "optimizer")


FLAGS = (
    f"--max_steps {STEPS} --batch_size 4 --accumulation_steps 2 --dim 64 --max_seq_len 64 "
    "--learning_rate 1e-2 --eval_interval 50 --save_interval 50 --sample_prompt sum "
    "--sample_tokens 20"
)


@pytest.fixture(scope="module")
def zero2(packed, tmp_path_factory) -> Trained:
    """Method 1 in new processes: ZeRO-2 on two of them in bf16, until something is learned."""
    path = tmp_path_factory.mktemp("zero2") / "run"
    reports = f" --log_with tensorboard --profile --profile_interval {PROFILE_INTERVAL}"
    ended = run(train_command("zero2", 2, packed, path, FLAGS + reports))
    assert ended.code == 0, ended.out
    return Trained(path, ended.out)


def said(run: Trained, fact: str) -> str:
    """Return a fact of the start block."""
    return re.search(rf"^ *{fact}: (.*)$", run.out, re.MULTILINE)[1]


def test_the_start_block_says_what_is_in_use(zero2, packed):
    assert said(zero2, "engine") == "DeepSpeed ZeRO-2"
    assert said(zero2, "processes").startswith("2 ")
    assert said(zero2, "precision") == "bf16"
    assert "engine: DDP" not in zero2.out
    assert said(zero2, "attention") == "blocks of rows"
    assert said(zero2, "compiled").startswith("no (the run is too short")
    assert said(zero2, "parameters").startswith("0.12 million (dim 64, 2 layers, 4 heads")
    assert said(zero2, "data").startswith(str(packed))
    assert said(zero2, "global batch") == (
        "16 sequences = 1,024 tokens per step (4 × 2 accumulation × 2 processes)"
    )
    assert said(zero2, "steps").startswith(f"{STEPS} ")
    assert said(zero2, "memory").startswith("about ")


TWO = ["--num_processes=2", "--mixed_precision=bf16"]
FILE = ["--deepspeed_config_file", "ds_config.json"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--use_deepspeed", *FILE, *TWO], "DeepSpeed ZeRO-2$"),
        (["--multi_gpu", *TWO, *FILE], "DDP, not DeepSpeed.*--deepspeed ds_config.json"),
    ],
)
def test_flags_of_the_launcher_start_the_engine_that_is_said(packed, tmp_path, flags, says):
    """Method 2: without a configuration file."""
    command = [*LAUNCH, *flags, "train_pretrain_accelerate.py"]
    trained = train(command, 2, packed, tmp_path / "run", "--max_steps 2")
    assert re.match(says, said(trained, "engine"))
    assert said(trained, "processes").startswith("2 ")
    assert trained.column("step") == [1, 2]


def test_the_model_learns(zero2):
    losses = zero2.column("loss")
    assert losses[0] == pytest.approx(6.0, abs=0.2)  # ln 400: nothing known
    assert sum(losses[-10:]) / 10 < LEARNED
    assert zero2.rows("val_loss")[-1]["val_loss"] < LEARNED


def test_metrics_hold_every_step_validation_and_profile(zero2):
    assert zero2.column("step") == list(range(1, STEPS + 1))
    assert [row["step"] for row in zero2.rows("val_loss")] == [50, STEPS]
    assert [row["step"] for row in zero2.rows("forward_seconds")] == [50, STEPS]
    first, *others = zero2.column("tokens_per_second")
    assert first is None  # it compiles, and is no speed
    assert all(rate >= 0 for rate in others)


def test_checkpoints_are_whole_and_none_is_half_written(zero2):
    names = sorted(path.name for path in (zero2.path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000050", "step-00000100"]
    assert sorted(path.name for path in zero2.checkpoint().iterdir()) == [
        "manifest.json",
        "optimizer.safetensors",
        "random.safetensors",
        "state.json",
        "weights.safetensors",
    ]


def test_the_weights_can_be_used_elsewhere(zero2, packed):
    model = load_portable(zero2.path / "weights")
    saved = zero2.tensors()
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokenizer = Tokenizer(zero2.path / "weights" / "tokenizer.model")
    assert tokenizer.vocab_size == model.config.vocab_size


def test_a_picture_and_a_sample_are_left(zero2):
    assert (zero2.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (zero2.path / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith("sum")
    assert sample.strip() in zero2.out
    assert str(zero2.path / "weights") in zero2.out


def test_traces_show_the_phases_of_a_step(zero2):
    traces = sorted(path.name for path in (zero2.path / "profile").glob("*.gz"))
    assert traces == [
        f"step-{step:08d}-rank{rank}.json.gz" for step in (50, STEPS) for rank in (0, 1)
    ]
    with gzip.open(zero2.path / "profile" / traces[-1], "rt", encoding="utf-8") as file:
        events = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert set(PHASES) <= events
    for row in zero2.rows("forward_seconds"):
        assert {f"{phase}_seconds" for phase in (*PHASES, "step")} <= row.keys()
    assert f"profile of step {PROFILE_INTERVAL}: " in zero2.out
