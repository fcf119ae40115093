import pytest

from benchmarks import optimizer_step

SHAPE = ["--dim", "32", "--n_layers", "1", "--n_heads", "2", "--max_seq_len", "16"]
TINY = [*SHAPE, "--batch_size", "1", "--compile", "off", "--rounds", "2"]


def test_optimizers_take_turns_and_their_ratio_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(optimizer_step, "keep_freed_memory", lambda: True)
    optimizer_step.main(TINY)
    shown = capsys.readouterr().out
    assert "adamw: " in shown
    assert "a step with Muon takes" in shown


def test_turns_are_taken_one_after_the_other():
    order = []
    steps = {name: lambda name=name: order.append(name) or (1.0, 0.5) for name in ("a", "b")}
    assert optimizer_step.measure(steps, 2) == {"a": [(1.0, 0.5)] * 2, "b": [(1.0, 0.5)] * 2}
    assert order == ["a", "b", "a", "b"]


def test_the_update_is_part_of_the_step():
    whole, update = optimizer_step.training_step("muon", optimizer_step.parse_options(TINY))()
    assert 0 < update < whole


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dim 7", "dim 7 is not divisible"),
        ("--batch_size 0", "--batch_size must be at least 1"),
        ("--rounds 0", "--rounds must be at least 1"),
        ("--dtype float16", "invalid choice: 'float16'"),
        ("--accumulation_steps 8", "unrecognized argument --accumulation_steps"),
        ("--optimizer muon", "unrecognized argument --optimizer"),
    ],
)
def test_a_flag_that_is_wrong_or_would_be_ignored_is_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        optimizer_step.main(flags.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.optimizer_step: error: ")
    assert said in error
    assert error.count("\n") == 1


def test_without_a_working_compiler_nothing_runs_uncompiled_in_silence(monkeypatch, capsys):
    monkeypatch.setattr(optimizer_step, "obstacle", lambda device: "no compiler")
    with pytest.raises(SystemExit) as ended:
        optimizer_step.main([*SHAPE, "--batch_size", "1"])
    assert ended.value.code == 2
    assert "cannot compile: no compiler; pass --compile off" in capsys.readouterr().err


def test_help_is_its_own(capsys):
    with pytest.raises(SystemExit) as ended:
        optimizer_step.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "benchmarks.optimizer_step" in shown
    assert "--resume" not in shown
