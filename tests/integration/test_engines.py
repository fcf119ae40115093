"""The engines of configs/: each trains, holds and sends what it should, and goes on from the
checkpoint of each other one."""

import json
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
from conftest import REPOSITORY, Trained, deepspeed_command, found_by, train

from formats.portable import load_portable

pytestmark = pytest.mark.slow

PROCESSES = 3
ENGINES = ("ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
DIVIDED = ("zero3", "zero3_offload")
TOLERANCE = 1e-4
COMPILES = all(map(shutil.which, ("ninja", "c++")))  # DeepSpeed's AdamW for the CPU
AIO = COMPILES and find_library("aio") is not None

# Each from each other one's checkpoint: the relay below goes through all engines once.
PAIRS = pytest.mark.variant


@pytest.fixture(scope="module", autouse=True)
def operations(thorough) -> None:
    """DeepSpeed's own are compiled for --all alone, since each environment compiles its own, and
    before a run needs them: beside other tests that takes longer than a run may."""
    for name in ("CPUAdamBuilder", *["PinMemoryBuilder", "AsyncIOBuilder"] * AIO):
        if thorough and COMPILES:
            load = f"from deepspeed.ops.op_builder import {name}; {name}().load()"
            subprocess.run([sys.executable, "-c", load], check=True)


@pytest.fixture(scope="module")
def all_engines(tmp_path_factory) -> dict:
    """What all_engines.py has found out."""
    return found_by("all_engines.py", tmp_path_factory.mktemp("all_engines"), PROCESSES, ENGINES)


@PAIRS
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_trains_as_ddp_does(name, all_engines):
    expected = all_engines["fp32"]["ddp"]["losses"]
    assert all_engines["fp32"][name]["losses"] == pytest.approx(expected, abs=TOLERANCE)
    assert expected[-1] < expected[0] - 0.01
    bf16 = all_engines["bf16"]
    assert bf16[name]["losses"] == pytest.approx(bf16["ddp"]["losses"], abs=0.02)


@PAIRS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_begins_with_the_weights_that_the_seed_draws(name, precision, all_engines):
    facts = all_engines[precision][name]
    own = name.endswith("_offload") and COMPILES
    assert facts["by"] == ("DeepSpeedCPUAdam" if own else "AdamW")
    assert facts["starts as drawn"]
    assert facts["pos_cis"] == "torch.complex64"
    assert facts["parameters"] == all_engines["fp32"]["ddp"]["held"]
    assert facts["held"] == (0 if name in DIVIDED else facts["parameters"])


@PAIRS
@pytest.mark.parametrize("name", ENGINES)
def test_the_precision_of_what_is_held_and_stepped(name, all_engines):
    # DDP computes in bf16 by autocast. DeepSpeed's model is bf16, what is stepped is not.
    assert all_engines["bf16"][name]["weights"] == ["float32" if name == "ddp" else "bfloat16"]
    for precision in ("fp32", "bf16"):
        for fact in ("moments", "stepped"):
            assert all_engines[precision][name][fact] == ["float32"], fact


@PAIRS
@pytest.mark.parametrize("before", ENGINES)
@pytest.mark.parametrize("after", ENGINES)
def test_a_checkpoint_goes_on_under_every_engine(before, after, all_engines):
    whole = all_engines["fp32"][before]["losses"][2:]
    resumed = all_engines["resumed"][after][before]
    if before == after != "ddp":
        assert resumed == {"losses": whole, "difference": 0}
    # DDP fills its buckets in another order after its first step, and the sum of three changes with
    # it; of two it does not: test_resume.py.
    assert resumed["losses"] == pytest.approx(whole, abs=TOLERANCE)
    assert resumed["difference"] < 10 * TOLERANCE


# Engine and number of processes, one after the other in one run: 8 sequences each step.
RELAY = [("zero3", 2), ("ddp", 2), ("zero3_offload", 1)]
RELAY += [("zero1", 2), ("zero2_offload", 2), ("zero2", 1)]
NAMES = {
    "ddp": "DDP, not DeepSpeed",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
    "zero2_offload": "DeepSpeed ZeRO-2, optimizer on the CPU",
    "zero3": "DeepSpeed ZeRO-3",
    "zero3_offload": "DeepSpeed ZeRO-3, all on the CPU",
}
FLAGS = "--dtype float32 --learning_rate 1e-2 --warmup_steps 0 --lr_schedule constant --keep_last 0"


@pytest.fixture(scope="module")
def relay(packed, tmp_path_factory, path_without_compilers, thorough) -> list[Trained]:
    """A run that every engine takes one step further, validating and writing a sample."""
    environ = {} if thorough else {"PATH": path_without_compilers}
    path, runs = tmp_path_factory.mktemp("relay") / "run", []
    for step, (engine, processes) in enumerate(RELAY, start=1):
        flags = f"{FLAGS} --batch_size {8 // processes} --max_steps {step} --resume auto"
        flags += f" --sample_interval {step} --eval_samples 17"
        runs.append(train(f"configs/{engine}.yaml", processes, packed, path, flags, **environ))
    return runs


@pytest.fixture(scope="module")
def whole(packed, tmp_path_factory) -> Trained:
    """The same run by a single process without engine."""
    path = tmp_path_factory.mktemp("whole") / "run"
    flags = f"{FLAGS} --batch_size 8 --max_steps {len(RELAY)} --eval_interval 1 --eval_samples 17"
    return train("plain", 1, packed, path, f"{flags} --save_interval 1 --sample_interval 1")


def test_every_file_of_configs_is_launched(relay):
    for (engine, _), run in zip(RELAY, relay, strict=True):
        assert f"engine: {NAMES[engine]}" in run.out
    assert NAMES.keys() == {engine for engine, _ in RELAY}


def test_a_run_that_passes_through_all_engines_is_that_of_one_process(relay, whole):
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


def test_samples_are_written_whoever_has_the_weights(relay, whole):
    lines = (relay[-1].path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(RELAY) + 1))
    assert lines == (whole.path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    for run in (relay[-1], whole):
        assert load_portable(run.path / "weights").num_parameters() > 0


def nvme_command(folder: Path, processes: int) -> list[str]:
    """ZeRO-Infinity as in configs/, in a folder of the test's own and with small buffers."""
    config = json.loads((REPOSITORY / "configs" / "zero_infinity.json").read_text())
    for what in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][what]["nvme_path"] = str(folder)
    config["zero_optimization"]["offload_param"]["buffer_size"] = 10**6
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(config))
    return deepspeed_command(file, processes)


@pytest.mark.variant
@pytest.mark.skipif(not AIO, reason="needs libaio and a compiler")
def test_on_nvme_a_run_goes_on_to_the_bit_and_leaves_nothing_in_memory(packed, tmp_path):
    # Partitions below 1 MiB stay in memory: most of this model's are larger, and more than buffers.
    flags = f"{FLAGS} --dim 512 --n_layers 3 --batch_size 2 --max_steps 4 --save_interval 2"
    command = nvme_command(tmp_path / "nvme", 2)
    whole = train(command, 2, packed, tmp_path / "whole", flags)
    assert "engine: DeepSpeed ZeRO-3, all on NVMe" in whole.out
    files = [file for file in (tmp_path / "nvme").rglob("*.swp") if file.is_file()]
    state = sum(tensor.nbytes for tensor in whole.tensors("optimizer").values())
    assert sum(file.stat().st_size for file in files if "optimizer" in file.parts) > 1.2 * state
    assert any("float32params" in file.parts for file in files)
    for after, exact in ((command, True), ("zero2", False)):
        path = tmp_path / f"resumed-{exact}"
        shutil.copytree(whole.checkpoint(2), path / "checkpoints" / whole.checkpoint(2).name)
        resumed = train(after, 2, packed, path, f"{flags} --resume {path}")
        assert resumed.column("loss") == pytest.approx(whole.column("loss")[2:], abs=TOLERANCE)
        for file in ("weights", "optimizer"):
            for name, expected in whole.tensors(file).items():
                here = resumed.tensors(file)[name]
                allowed = 0 if exact else 10 * TOLERANCE * expected.abs().max()
                assert (here - expected).abs().max() <= allowed, name
