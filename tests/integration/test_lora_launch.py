"""Adapters in training: the same under every engine, and resumed to the bit."""

import json
import shutil
import sys
from collections import ChainMap
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY, launch_command, run_warm, train

from formats.peft import load_adapter
from formats.portable import load_portable
from model.lora import Merged
from runs.weights import load_trained

pytestmark = pytest.mark.slow

ENGINES = ("ddp", "zero1", "zero2", "zero3")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> dict:
    """What lora_engines.py has found out."""
    folder = tmp_path_factory.mktemp("lora_engines")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    launch += ["--num_processes", "2", "--main_process_port", "0"]
    script = REPOSITORY / "tests" / "integration" / "lora_engines.py"
    ended = run_warm([*launch, str(script), str(folder), *ENGINES], PYTHONPATH=str(REPOSITORY))
    assert ended.code == 0, ended.out
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_trains_adapters_as_ddp_does(name, engines):
    expected = engines["float32"]["ddp"]["losses"]
    assert engines["float32"][name]["losses"] == pytest.approx(expected, abs=TOLERANCE)
    assert expected[-1] < expected[0] - 0.01
    bf16 = engines["bfloat16"]
    assert bf16[name]["losses"] == pytest.approx(bf16["ddp"]["losses"], abs=0.02)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENGINES)
def test_the_base_stays_as_it_was_and_checkpoints_have_adapters_alone(name, precision, engines):
    facts = engines[precision][name]
    assert facts["as the base"]
    assert facts["without gradient"]
    assert facts["frozen"] == [precision]
    assert len(facts["trained"]) == 2 * 7 * 2  # factors, layers, blocks
    assert all(name.endswith((".lora_a", ".lora_b")) for name in facts["trained"])
    assert len(facts["moments"]) == 2 * len(facts["trained"])


@pytest.mark.parametrize("name", ENGINES)
def test_samples_see_the_adapters(name, engines):
    assert engines["float32"][name]["whole"] < TOLERANCE
    assert engines["bfloat16"][name]["whole"] < 0.05


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_run_goes_on_to_the_bit(name, precision, engines):
    facts = engines[precision][name]
    assert facts["goes on"] == {"losses": facts["losses"][2:], "difference": 0}


@pytest.mark.parametrize("before", ENGINES)
@pytest.mark.parametrize("after", ENGINES)
def test_a_checkpoint_of_adapters_goes_on_under_every_engine(before, after, engines):
    whole = engines["float32"][before]["losses"][2:]
    resumed = engines["resumed"][after][before]
    if before == after:
        assert resumed == {"losses": whole, "difference": 0}
    assert resumed["losses"] == pytest.approx(whole, abs=TOLERANCE)
    assert resumed["difference"] < 10 * TOLERANCE


def test_muon_steps_both_factors(engines):
    ddp, zero2 = engines["muon"]["ddp"], engines["muon"]["zero2"]
    # Newton and Schulz make much of the smallest singular values, rounding errors among them.
    assert zero2["losses"] == pytest.approx(ddp["losses"], abs=10 * TOLERANCE)
    assert ddp["losses"][-1] < ddp["losses"][0]
    for facts in (ddp, zero2):
        assert facts["goes on"] == {"losses": facts["losses"][2:], "difference": 0}
    assert len(ddp["moments"]) == 2 * 7 * 2
    assert all(name.endswith(".momentum_buffer") for name in ddp["moments"])


FLAGS = (
    "--dtype bfloat16 --learning_rate 1e-2 --warmup_steps 0 --lr_schedule constant --keep_last 0"
)


@pytest.fixture(scope="module")
def runs(packed, tmp_path_factory) -> SimpleNamespace:
    """A base, a run with adapters on it, and the same stopped half way, going on when the base that
    it came from is gone."""
    folder = tmp_path_factory.mktemp("lora")
    base = train("plain", 1, packed, folder / "base", f"{FLAGS} --max_steps 4 --batch_size 4")
    command = [*launch_command("configs/zero3.yaml", 2)[:-1]]
    command += [str(REPOSITORY / "tests" / "integration" / "lora_pretraining.py")]
    flags = f"{FLAGS} --max_steps 4 --batch_size 2 --save_interval 2 --sample_interval 2"
    whole = train(command, 2, packed, folder / "whole", f"{flags} --init_from {base.path}")
    weights = dict(load_trained(str(base.path)).model.named_parameters())
    shutil.rmtree(base.path)
    resumed = folder / "resumed"
    shutil.copytree(whole.path / "base", resumed / "base")
    shutil.copytree(whole.checkpoint(2), resumed / "checkpoints" / whole.checkpoint(2).name)
    flags += f" --resume {resumed} --init_from {resumed / 'base'}"
    resumed = train(command, 2, packed, resumed, flags)
    return SimpleNamespace(base=weights, whole=whole, resumed=resumed)


def test_a_run_goes_on_to_the_bit_when_its_base_is_gone(runs):
    assert runs.resumed.column("loss") == runs.whole.column("loss")[2:]
    for file in ("weights", "optimizer"):
        whole, resumed = (run.tensors(file) for run in (runs.whole, runs.resumed))
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_checkpoint_has_what_is_trained_alone(runs):
    names = set(runs.whole.tensors())
    assert sum(name.endswith((".lora_a", ".lora_b")) for name in names) == 2 * 7 * 2
    others = {name for name in names if "lora" not in name}
    assert "tok_embeddings.weight" in others
    assert not any("attention.w" in name or "feed_forward.w" in name for name in others)


def test_a_run_leaves_weights_without_adapters_and_these_by_themselves(runs):
    path = runs.whole.path
    model = load_portable(path / "weights")
    adapter, scaling = load_adapter(path / "adapter", model.config)
    merged = Merged(ChainMap(adapter, runs.base), scaling)
    under_way = load_trained(str(runs.whole.checkpoint())).model
    kept = dict(load_portable(path / "base").named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, merged[name]), name
        assert torch.equal(weight, dict(under_way.named_parameters())[name]), name
        assert torch.equal(kept[name], runs.base[name]), name
        assert not torch.equal(weight, kept[name]), name


def test_what_is_trained_is_said_at_start(runs):
    adapters = sum(t.numel() for n, t in runs.whole.tensors().items()) / 1e6
    assert (
        f"of which {adapters:.2f} million are trained: LoRA of dim 4 and alpha 32" in runs.whole.out
    )
    assert "in 'layers', and all others" in runs.whole.out
