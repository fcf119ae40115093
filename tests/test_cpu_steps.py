import json
import sys

import pytest
from conftest import REPOSITORY, run

from common.errors import UsageError
from runs.find import DISTILLATION, PRETRAINING
from runs.folder import RunFolder
from training import cpu_steps
from training.arguments import parse_arguments
from training.cpu_steps import ADAMW, MUON, intervals, main, optimizer, suited_steps
from training.engine.deepspeed_config import read_config, resolve
from training.engine.kinds import FILES, engines


@pytest.mark.parametrize(
    ("tokens", "segmentations", "steps"),
    [
        (3_500_000, 1, 600),
        (614_400, 1, 600),  # of 4,096 tokens: four passes
        (382_016, 1, 373),
        (9_000, 1, 100),
        (2_216_140, 7, 541),  # one pass
        (63_000, 7, 100),
    ],
)
def test_a_small_text_is_read_four_times_or_in_every_way_but_for_100_steps_at_least(
    tokens, segmentations, steps
):
    assert suited_steps(tokens, segmentations) == steps


@pytest.mark.parametrize(
    ("steps", "log", "often", "save"),
    [
        (1_000_000, 20, 100, 200),
        (600, 20, 100, 200),
        (373, 20, 62, 124),
        (100, 20, 20, 40),
        (30, 20, 20, 30),
        (2, 2, 2, 2),
        (1, 1, 1, 1),
    ],
)
def test_no_interval_lies_beyond_the_last_step(steps, log, often, save):
    args, _ = parse_arguments(intervals(steps).split())
    assert (args.log_interval, args.save_interval) == (log, save)
    assert args.eval_interval == args.sample_interval == often


def test_steps_by_the_text_go_to_stdout_and_are_said_in_one_line(packed, capfd):
    main(["--data", str(packed), "--dim", "nonsense"])
    tokens = json.loads((packed / "dataset.json").read_text())["splits"]["train"]["tokens"]
    steps = suited_steps(tokens, segmentations=1)
    out, said = capfd.readouterr()
    flags = f"--max_steps {steps} {intervals(steps)} {MUON}"
    assert out.split() == flags.split()
    assert (
        said == f"for a text of {tokens:,} tokens: --max_steps {steps}, unless you give another\n"
    )


@pytest.mark.parametrize(
    ("typed", "steps"),
    [(["--max_steps", "300"], 300), (["--max_steps=7"], 7), (["--max_steps", "many"], None)],
)
def test_steps_that_are_typed_decide(packed, capfd, typed, steps):
    main(["--data", str(packed), *typed])
    out, said = capfd.readouterr()
    assert said == ""
    assert "--max_steps" not in out
    if steps:
        assert out.split() == [*intervals(steps).split(), *MUON.split()]


def test_with_a_teacher_the_text_is_what_it_was_trained_on(packed, tmp_path, capfd, monkeypatch):
    (tmp_path / "settings.json").write_text(json.dumps({"arguments": {"data": str(packed)}}))
    main(["--data", str(packed)])
    alone = capfd.readouterr().out
    main(["--teacher", str(tmp_path)])
    assert capfd.readouterr().out == alone  # so little text is read as often
    numbers = {"format": 1, "samples_per_part": 1, "k": 1, "vocab_size": 400, "temperature": 2}
    recorded = numbers | {"parts": [], "teacher": "t", "folder": str(packed)}
    (tmp_path / "teacher_logits.json").write_text(json.dumps(recorded))
    main(["--teacher", "auto", "--teacher_logits", str(tmp_path)])
    assert capfd.readouterr().out == alone
    main(["--teacher", "none", "--resume", str(tmp_path)])
    assert capfd.readouterr().out == alone  # a run that goes on has its own text
    monkeypatch.setattr(cpu_steps, "MOST_TAUGHT", 7)
    main(["--teacher", "auto", "--teacher", str(tmp_path)])
    assert capfd.readouterr().out.split()[:2] == ["--max_steps", "7"]


def test_a_run_that_goes_on_by_auto_has_its_own_text(packed, tmp_path, capfd):
    """Not that of a pretraining which may be the newest teacher by now."""

    def saves(name: str, program: str, data: str) -> None:
        run = RunFolder(tmp_path / name)
        run.checkpoint(1).mkdir(parents=True)
        run.settings.write_text(json.dumps({"program": program, "arguments": {"data": data}}))

    saves("distilled", DISTILLATION, str(packed))
    saves("pretrained", PRETRAINING, "another")
    main(["--data", str(packed)])
    alone = capfd.readouterr().out
    resumed = ["--teacher", "none", "--resume", "auto", "--out_dir", str(tmp_path)]
    main(resumed)
    main([*resumed, "--run_name", "distilled"])
    assert capfd.readouterr().out == 2 * alone
    with pytest.raises(UsageError, match="none: no such folder"):
        main([*resumed, "--run_name", "new"])  # which starts as if it were not resumed


def test_epochs_that_are_typed_are_not_cut_short(packed, capfd):
    main(["--data", "elsewhere", "--epochs", "3", "--data", str(packed)])
    args, _ = parse_arguments([*capfd.readouterr().out.split(), "--epochs", "3"])
    assert args.max_steps is None
    assert args.epochs == 3


@pytest.mark.parametrize("name", ["ddp", *FILES])
def test_muon_is_given_to_the_engines_that_take_it(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    kind = next(kind for kind in engines(dim=192) if kind.config == name)
    expected = MUON if kind.takes_muon else ADAMW
    assert optimizer(f"configs/{name}.yaml", None) == expected
    if name in FILES:
        assert optimizer("accelerate_config.yaml", FILES[name]) == expected
        args, _ = parse_arguments([*expected.split(), "--deepspeed", FILES[name]])
        resolve(read_config(FILES[name]), args, 1, name)


def test_a_launchers_own_fields_and_old_names_count_too(tmp_path):
    yaml, ds = tmp_path / "launch.yaml", tmp_path / "ds.json"
    for field, flags in (("zero_stage: 3", ADAMW), ("zero_stage: 2", MUON)):
        yaml.write_text(f"deepspeed_config:\n  {field}\n")
        assert optimizer(str(yaml), None) == flags
    yaml.write_text("deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}")
    assert optimizer(str(yaml), None) == ADAMW
    ds.write_text('{"zero_optimization": {"stage": 2, "cpu_offload": true}}')
    assert optimizer("nowhere", str(ds)) == ADAMW
    for nonsense in ("[1]", "deepspeed_config: 3", "a: b: c", "deepspeed_config: {x: 1}"):
        yaml.write_text(nonsense)
        assert optimizer(str(yaml), None) == MUON
    assert optimizer("nowhere", None) == optimizer(None, "nowhere") == MUON


def test_data_that_is_none_ends_in_one_line(tmp_path):
    ended = run([sys.executable, "-m", "training.cpu_steps", "--data", str(tmp_path)])
    assert ended.code == 2
    assert ended.out.startswith(f"run_accelerate.sh: error: {tmp_path}: no prepared data here")
