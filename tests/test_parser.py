import argparse

import pytest

from lm.common.errors import UsageError
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


def test_a_text_may_begin_with_a_dash_but_a_flag_is_never_taken_for_a_text():
    made = parser()
    made.add_argument("--prompt", action="append", help="text")
    typed = ["--prompt", "-x", "--prompt", "- [ ] y", "--prompt", "---", "--greedy", "--dim", "3"]
    args = made.parse_args(typed)
    assert (args.prompt, args.greedy, args.dim) == (["-x", "- [ ] y", "---"], True, 3)
    for mistake in (["--prompt", "--greedy"], ["--prompt", "--gredy"]):
        with pytest.raises(UsageError, match="begins with a dash: --prompt=VALUE"):
            made.parse_args(mistake)
