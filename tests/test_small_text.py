import json
import sys

import pytest
from conftest import run

from training.arguments import parse_arguments
from training.small_text import main, suited_flags


@pytest.mark.parametrize(
    ("tokens", "flags"),
    [
        (3_500_000, []),
        (614_400, []),  # 600 steps of 4,096 tokens are four passes
        (382_016, ["--max_steps", "373"]),
        (9_000, ["--max_steps", "100"]),
    ],
)
def test_a_small_text_is_read_four_times_but_for_100_steps_at_least(tokens, flags):
    assert suited_flags(tokens).split() == flags


def test_a_flag_that_is_typed_behind_wins():
    args, _ = parse_arguments([*suited_flags(382_016).split(), "--max_steps", "7"])
    assert args.max_steps == 7


def test_flags_alone_go_to_stdout_and_what_they_are_is_said_in_one_line(packed, capfd):
    main(str(packed))
    tokens = json.loads((packed / "dataset.json").read_text())["splits"]["train"]["tokens"]
    flags = suited_flags(tokens)
    out, said = capfd.readouterr()
    assert out.split() == flags.split()
    assert said == f"for a text of {tokens:,} tokens: {flags}, unless you give another\n"


def test_data_that_is_none_ends_in_one_line(tmp_path):
    ended = run([sys.executable, "-m", "training.small_text", str(tmp_path)])
    assert ended.code == 2
    assert ended.out.startswith(f"run_accelerate.sh: error: {tmp_path}: no prepared data here")
