import argparse

from conftest import error_of

from lm.common.parser import OneLineParser


def parser() -> OneLineParser:
    parser = OneLineParser(prog="prog", description="First line.\n\n    an example")
    parser.add_argument("--dim", type=int, default=0, help="how many")
    parser.add_argument("--learning_rate", default=1.5, help="what (default: as it looks)")
    parser.add_argument("--fast", action=argparse.BooleanOptionalAction, help="whether")
    parser.add_argument("--greedy", action="store_true", help="whether")
    return parser


def test_help_shows_each_default_once_and_none_for_switches(capsys):
    parser().print_help()
    said = capsys.readouterr().out
    assert "\n    an example\n" in said
    assert "how many (default: 0)\n" in said
    assert said.count("(default:") == 2
    assert said.count("whether\n") == 2


def test_the_error_of_a_value_that_begins_with_a_dash_says_how_to_type_it():
    made = parser()
    made.add_argument("--prompt", help="text")
    assert made.parse_args(["--prompt", "- [ ] y"]).prompt == "- [ ] y"
    assert "begins with a dash: --prompt=VALUE" in error_of(made.parse_args, ["--prompt", "-x"])
    assert made.parse_args(["--prompt=-x"]).prompt == "-x"
