import argparse

import pytest

from common.errors import UsageError
from common.parser import ELSEWHERE, OneLineParser
from training.arguments import build_parser


def guess(*typed: str) -> str:
    """What a parser with a few flags says to unknown words."""
    parser = OneLineParser(prog="prog")
    parser.add_argument("--data")
    parser.add_argument("--dim", type=int)
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--help_me")
    parser.add_argument("--fast", action=argparse.BooleanOptionalAction)
    parser.add_argument("--greedy", action="store_true")
    with pytest.raises(UsageError) as error:
        parser.parse_args(typed)
    return str(error.value).removesuffix(" (see --help)")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--lr 3", "--lr: did you mean --learning_rate?"),
        ("--learning-rate 3", "--learning-rate: did you mean --learning_rate?"),
        ("--hidden_size=64", "--hidden_size=64: did you mean --dim?"),
        ("--bs 3", "--bs"),  # --batch_size is no flag of this program
        ("dim 512", "dim: did you mean --dim?"),
        ("--fast dim 512", "dim: did you mean --dim?"),
        ("--fast false", "false: --fast takes no value, --no-fast switches it off"),
        ("--greedy true", "true: --greedy takes no value"),
        ("my.txt", "my.txt: text is given as DATA=my.txt or --data my.txt"),
        ("--data my.txt more.txt", "more.txt: text is given as DATA=more.txt or --data more.txt"),
        ("--data_ x", "--data_: did you mean --data?"),
    ],
)
def test_an_unknown_word_is_answered_with_what_was_meant(typed, said):
    assert guess(*typed.split()) == f"unrecognized argument {said}"


def test_help_is_never_what_was_meant():
    parser = OneLineParser(prog="prog")
    for typed in ("--lr", "--hel_", "-H"):
        with pytest.raises(UsageError) as error:
            parser.parse_args([typed])
        assert str(error.value) == f"unrecognized argument {typed} (see --help)"


def test_every_name_from_elsewhere_leads_to_a_flag_of_some_program():
    of_generate = {"--max_new_tokens", "--num_samples"}
    known = of_generate | set(build_parser()._option_string_actions)
    for ours, theirs in ELSEWHERE.items():
        assert f"--{ours}" in known
        assert not {f"--{name}" for name in theirs.split()} & known - {"--out"}


def test_help_names_a_default_once_and_leaves_switches_alone(capsys):
    parser = OneLineParser(prog="prog", description="First line.\n\n    an example")
    parser.add_argument("--a", type=int, default=0, help="how many")
    parser.add_argument("--b", help="what (default: as it looks)")
    parser.add_argument("--c", type=float, default=1.5, help="how much (default: 1.5)")
    parser.add_argument("--d", action="store_true", help="whether")
    parser.print_help()
    lines = capsys.readouterr().out.splitlines()
    assert "    an example" in lines
    assert [line[11:].strip() for line in lines[-4:]] == [
        "how many (default: 0)",
        "what (default: as it looks)",
        "how much (default: 1.5)",
        "whether",
    ]


def test_all_unknown_flags_are_said_at_once_each_with_its_guess():
    assert guess("--lr", "3", "--foo", "--dimm", "8") == (
        "unrecognized arguments: --lr (did you mean --learning_rate?), --foo, "
        "--dimm (did you mean --dim?)"
    )


def test_the_value_of_an_unknown_flag_may_be_that_of_a_known_one_too():
    said = guess("--dim", "32", "--dimm", "32")
    assert said == "unrecognized argument --dimm: did you mean --dim?"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--vocab_size 2000", "PREPARE_FLAGS"),
        ("--text_column poem", "PREPARE_FLAGS"),
        ("--skip_bad_lines", "PREPARE_FLAGS=--skip_bad_lines"),
        ("--num_gpus 2", "the deepspeed launcher, before the name of the script"),
        ("--hostfile=hosts", "the deepspeed launcher, before the name of the script"),
        ("--use_wandb", "did you mean --log_with?"),
        ("--from_weight pretrain", "did you mean --init_from?"),
    ],
)
def test_flags_of_other_projects_get_the_right_hint(typed, hint):
    with pytest.raises(UsageError) as error:
        build_parser().parse_args(typed.split())
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("typed", ["--deepspeed ds.json", "--deepspeed_config=ds.json"])
def test_a_program_that_takes_no_deepspeed_file_names_the_launcher(typed):
    assert "accelerate launch --use_deepspeed" in guess(*typed.split())


def test_a_program_that_takes_no_local_rank_names_launchers_that_append_none():
    assert guess("--local_rank=0").endswith(
        "use accelerate launch here, or deepspeed --no_local_rank"
    )
