"""What of a process is each model's own comes back with its turn."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from training.engine.launch import Engine
from training.engine.turns import Turn


class Plugins:
    """Accelerate's state, as far as it has DeepSpeed's configurations."""

    def __init__(self, *names: str):
        self.plugins = {name: SimpleNamespace(selected=not i) for i, name in enumerate(names)}
        self.selections = []

    def get_deepspeed_plugin(self, name: str):
        return self.plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        self.selections.append(name)
        for each, plugin in self.plugins.items():
            plugin.selected = each == name


def turn_of(plugin: str | None = None, state: Plugins | None = None) -> Turn:
    accelerator = SimpleNamespace(device=torch.device("cpu"), state=state)
    return Turn(Engine(accelerator, "any engine", None, plugin))


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    monkeypatch.setattr(functional, "linear", functional.linear)
    with torch.random.fork_rng(devices=[]):
        yield


def drawn_alone(seed: int, numbers: int) -> list[float]:
    torch.manual_seed(seed)
    return [torch.rand(()).item() for _ in range(numbers)]


def test_each_draws_the_numbers_that_it_draws_alone():
    turns, drawn = {1: turn_of(), 2: turn_of()}, {1: [], 2: []}
    for seed, turn in turns.items():
        with turn.taken():
            torch.manual_seed(seed)
    for _ in range(3):
        for seed, turn in turns.items():
            with turn.taken():
                drawn[seed].append(torch.rand(()).item())
            torch.rand(7)  # of nobody
    assert drawn == {seed: drawn_alone(seed, 3) for seed in turns}


def test_a_turn_that_ends_in_an_error_gives_back_what_it_took():
    linear = functional.linear

    def fail() -> None:
        with turn_of().taken():
            functional.linear = "ZeRO-3's"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert functional.linear is linear


def test_the_linear_of_zero_3_stays_with_its_model():
    linear = functional.linear
    divided, other = turn_of(), turn_of()
    with divided.taken():
        functional.linear = "ZeRO-3's"
    with other.taken():
        assert functional.linear is linear
    with divided.taken():
        assert functional.linear == "ZeRO-3's"
    assert functional.linear is linear


def test_accelerate_is_told_whose_configuration_counts_and_only_when_it_changes():
    state = Plugins("0", "1")
    turns = [turn_of("0", state), turn_of("1", state)]
    for turn in (turns[0], turns[1], turns[1], turns[0]):
        with turn.taken():
            assert turn._engine.plugin == next(n for n, p in state.plugins.items() if p.selected)
    assert state.selections == ["1", "0"]
