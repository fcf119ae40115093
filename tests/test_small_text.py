import json
import sys

import pytest
from conftest import run

from training.arguments import parse_arguments
from training.small_text import BY_TOKENS, main, suited_flags


def test_a_large_text_takes_nothing_and_a_small_one_dropout():
    assert suited_flags(3_500_000) == ""
    assert suited_flags(300_000).split() == ["--dropout", "0.1"]
    assert "--max_steps" in suited_flags(50_000)


@pytest.mark.parametrize("recipe", BY_TOKENS, ids=str)
def test_they_are_flags_of_training_and_flags_behind_them_win(recipe):
    _, model = parse_arguments(recipe.flags.split())
    assert model.get("dropout", 0) > 0 or not recipe.flags
    args, model = parse_arguments([*recipe.flags.split(), "--max_steps", "7", "--dropout", "0.3"])
    assert (args.max_steps, model["dropout"]) == (7, 0.3)


def test_flags_alone_go_to_stdout_and_what_they_are_is_said_in_one_line(packed, capfd):
    main(str(packed))
    tokens = json.loads((packed / "dataset.json").read_text())["splits"]["train"]["tokens"]
    flags = suited_flags(tokens)
    out, said = capfd.readouterr()
    assert out.split() == flags.split()
    assert said == f"for a text of {tokens:,} tokens: {flags} (flags of your own win)\n"


def test_data_that_is_none_ends_in_one_line(tmp_path):
    ended = run([sys.executable, "-m", "training.small_text", str(tmp_path)])
    assert ended.code == 2
    assert ended.out.startswith(f"run_accelerate.sh: error: {tmp_path}: no prepared data here")
