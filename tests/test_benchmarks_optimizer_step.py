import pytest

from benchmarks import optimizer_step

SHAPE = ["--dim", "32", "--n_layers", "1", "--n_heads", "2", "--max_seq_len", "16"]
TINY = [*SHAPE, "--batch_size", "1", "--compile", "off"]


def test_optimizers_take_turns_and_their_ratio_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(optimizer_step, "ROUNDS", 2)
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
    whole, update = optimizer_step.training_step("muon", TINY)()
    assert 0 < update < whole


def test_a_wrong_flag_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        optimizer_step.main(["--dim", "7"])
    assert ended.value.code == 2
    assert "dim 7 is not divisible" in capsys.readouterr().err
