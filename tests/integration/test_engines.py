"""Engines of configs/ train, and resume from the checkpoint of another engine."""

import json
import shutil
import sys
from ctypes.util import find_library

import pytest
from conftest import REPOSITORY, Trained, run_warm, train

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
AIO = all(map(shutil.which, ("ninja", "c++"))) and find_library("aio") is not None


# For each step of one run: the engine, the number of processes, and what the run says at its start.
# A step has 8 sequences.
RELAY = (
    ("zero3", 2, "DeepSpeed ZeRO-3"),
    ("ddp", 2, "DDP, not DeepSpeed"),
    ("zero3_offload", 1, "DeepSpeed ZeRO-3, all on the CPU"),
    ("zero1", 2, "DeepSpeed ZeRO-1"),
    ("zero2_offload", 2, "DeepSpeed ZeRO-2, optimizer on the CPU"),
    ("zero2", 1, "DeepSpeed ZeRO-2"),
)
FLAGS = "--dtype float32 --learning_rate 1e-2 --warmup_steps 0 --lr_schedule constant --keep_last 0"


@pytest.fixture(scope="module")
def relay(packed, tmp_path_factory, path_without_compilers) -> list[Trained]:
    """One run. Each engine trains it for one step, and ends with a validation and a sample."""
    path, runs = tmp_path_factory.mktemp("relay") / "run", []
    for step, (engine, processes, _) in enumerate(RELAY, start=1):
        flags = f"{FLAGS} --batch_size {8 // processes} --max_steps {step} --resume auto"
        flags += f" --sample_interval {step} --eval_samples 17"
        where = (f"configs/{engine}.yaml", processes, packed, path)
        runs.append(train(*where, flags, PATH=path_without_compilers))
    return runs


@pytest.fixture(scope="module")
def whole(packed, tmp_path_factory) -> Trained:
    """The run of `relay` without a stop, in one process without DDP or DeepSpeed."""
    path = tmp_path_factory.mktemp("whole") / "run"
    flags = f"{FLAGS} --batch_size 8 --max_steps {len(RELAY)} --eval_interval 1 --eval_samples 17"
    return train("plain", 1, packed, path, f"{flags} --save_interval 1 --sample_interval 1")


def test_six_config_files_start_their_engines(relay):
    for (engine, _, name), part in zip(RELAY, relay, strict=True):
        assert f"engine: {name}" in part.out
        assert ("PyTorch's AdamW" in part.out) == ("offload" in engine)  # there is no compiler
    assert "changed since the run was stopped: engine DeepSpeed ZeRO-3 → DDP\n" in relay[1].out


def test_a_run_through_six_engines_equals_the_run_of_one_process(relay, whole):
    last = relay[-1]
    assert last.column("step") == list(range(1, len(RELAY) + 1))
    for key in ("loss", "grad_norm"):
        assert last.column(key) == pytest.approx(whole.column(key), abs=TOLERANCE)
    for ours, theirs in zip(last.rows("val_loss"), whole.rows("val_loss"), strict=True):
        assert ours["val_samples"] == theirs["val_samples"] == 17
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], abs=TOLERANCE)
    for file in ("weights", "optimizer"):
        for name, expected in whole.tensors(file).items():
            here = last.tensors(file)[name]
            assert (here - expected).abs().max() <= 10 * TOLERANCE * expected.abs().max(), name


def test_the_six_engines_write_the_same_samples(relay, whole):
    samples = relay[-1].samples()
    assert [row["step"] for row in samples] == list(range(1, len(RELAY) + 1))
    assert samples == whole.samples()


@pytest.mark.variant
@pytest.mark.skipif(not AIO, reason="needs a compiler and libaio (libaio-dev)")
def test_a_run_resumed_with_nvme_is_equal_to_the_bit_and_the_state_is_on_the_disk(packed, tmp_path):
    # A process's parts of 9 matrices exceed 1 MiB and leave RAM. DeepSpeed has 5 buffers for them.
    flags = f"{FLAGS} --dim 512 --n_layers 3 --batch_size 2 --max_steps 4 --save_interval 2"
    config = json.loads((REPOSITORY / "configs" / "zero_infinity.json").read_text())
    offloads = [config["zero_optimization"][f"offload_{what}"] for what in ("optimizer", "param")]
    for offload in offloads:
        offload["nvme_path"] = str(tmp_path / "nvme")
    offloads[1]["buffer_size"] = 10**6
    (tmp_path / "ds.json").write_text(json.dumps(config))
    whole = train(tmp_path / "ds.json", 2, packed, tmp_path / "whole", flags)
    assert "engine: DeepSpeed ZeRO-3, all on NVMe" in whole.out
    size = sum(path.stat().st_size for path in (tmp_path / "nvme").rglob("optimizer/**/*.swp"))
    assert size > 1.2 * sum(tensor.nbytes for tensor in whole.tensors("optimizer").values())
    path = whole.stopped_after(2, tmp_path / "resumed")
    assert train(tmp_path / "ds.json", 2, packed, path, f"{flags} --resume {path}").ends_as(whole)


MEASURE = """
import gc, sys
from lm.common.errors import TooLittleMemoryError
from model import Transformer
from lm.training.arguments import TrainingArguments
from lm.training.measurement import measure
from train_pretrain_accelerate import train

alive = []

def counted(run):
    models = [x for x in gc.get_objects() if isinstance(x, Transformer)]
    alive.append(sum(not model.norm.weight.is_meta for model in models))
    if len(alive) % 3 == 1:
        raise RuntimeError("CUDA out of memory")
    train(run)

flags = {"dim": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 32, "dtype": "float32"}
flags |= {"data": sys.argv[1], "compile": "off", "local_rank": None}
for file in (None, None, None, *["ds_config.json"] * 3):
    try:
        measure(counted, TrainingArguments, flags | {"deepspeed": file}, (1,), seconds=60)
    except TooLittleMemoryError:
        print("too little memory")
print("alive:", *alive)
"""


def test_a_measurement_frees_its_model_even_if_memory_runs_out(packed, tmp_path):
    """The first of three measurements runs out of memory, without and with DeepSpeed."""
    (tmp_path / "measure.py").write_text(MEASURE)
    out = run_warm([sys.executable, str(tmp_path / "measure.py"), str(packed)], PYTHONPATH=".")
    assert out.worked().count("too little memory") == 2
    assert "alive: 1 1 1 1 1 1\n" in out.out
