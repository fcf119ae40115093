import json
import sys

import pytest
from conftest import REPOSITORY, run

from training.arguments import parse_arguments
from training.cpu_steps import ADAMW, MUON, intervals, main, optimizer, suited_steps
from training.engine.kinds import FILES, engines


@pytest.mark.parametrize(
    ("tokens", "segmentations", "steps"),
    [(614_400, 1, 600), (382_016, 1, 373), (9_000, 1, 100), (2_216_140, 7, 541)],
)
def test_a_small_text_is_read_four_times_but_for_100_steps_at_least(tokens, segmentations, steps):
    assert suited_steps(tokens, segmentations) == steps


@pytest.mark.parametrize(
    ("steps", "log", "often", "save"),
    [(1_000_000, 20, 100, 200), (373, 20, 62, 124), (30, 20, 20, 30), (1, 1, 1, 1)],
)
def test_no_interval_lies_beyond_the_last_step(steps, log, often, save):
    args, _ = parse_arguments(intervals(steps).split())
    assert (args.log_interval, args.save_interval) == (log, save)
    assert args.eval_interval == args.sample_interval == often


def test_flags_go_to_stdout_and_the_steps_of_a_small_text_are_said(packed, capfd):
    def flags(*typed: str) -> tuple[list[str], str]:
        main([*typed])
        out, said = capfd.readouterr()
        assert out.endswith(f" {MUON}\n")
        return out.removesuffix(f" {MUON}\n").split(), said

    tokens = json.loads((packed / "dataset.json").read_text())["splits"]["train"]["tokens"]
    steps = suited_steps(tokens, segmentations=1)
    suited = f"--max_steps {steps} {intervals(steps)}".split()
    said = f"for a text of {tokens:,} tokens: --max_steps {steps}, unless you give another\n"
    assert flags("--data", str(packed), "--dim", "nonsense") == (suited, said)
    epochs = intervals(3 * tokens // 4096).split()
    assert flags("--data", "elsewhere", "--epochs", "3", "--data", str(packed)) == (epochs, "")
    assert flags("--data", str(packed), "--max_steps=7") == (intervals(7).split(), "")
    taught = f"--max_steps 180 {intervals(180)}".split()
    assert flags("--teacher", "auto") == (taught, "")


@pytest.mark.parametrize("name", ["ddp", *FILES])
def test_muon_is_given_to_the_engines_that_take_it(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    kind = next(kind for kind in engines(dim=192) if kind.config == name)
    expected = MUON if kind.takes_muon else ADAMW
    assert optimizer(f"configs/{name}.yaml", None) == expected
    if name in FILES:
        assert optimizer("accelerate_config.yaml", FILES[name]) == expected


def test_a_launchers_own_fields_and_old_names_count_too(tmp_path):
    yaml, ds = tmp_path / "launch.yaml", tmp_path / "ds.json"
    for fields, flags in (
        ("{zero_stage: 3}", ADAMW),
        ("{zero_stage: 2, offload_optimizer_device: none}", MUON),
        ("{zero_stage: 2, offload_optimizer_device: cpu}", ADAMW),
        ("[nonsense", MUON),  # refused where it is used
    ):
        yaml.write_text(f"deepspeed_config: {fields}\n")
        assert optimizer(str(yaml), None) == flags
    ds.write_text('{"zero_optimization": {"stage": 2, "cpu_offload": true}}')
    assert optimizer("nowhere", str(ds)) == ADAMW
    assert optimizer("nowhere", None) == optimizer(None, "nowhere") == MUON


def test_data_that_is_none_ends_in_one_line(tmp_path):
    ended = run([sys.executable, "-m", "training.cpu_steps", "--data", str(tmp_path)])
    assert ended.code == 2
    assert ended.out.startswith(f"run_accelerate.sh: error: {tmp_path}: no prepared data here")
