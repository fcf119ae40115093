import argparse

import pytest

from common.errors import UsageError
from common.parser import OneLineParser, is_text


def parser() -> OneLineParser:
    parser = OneLineParser(prog="prog", description="First line.\n\n    an example")
    parser.add_argument("--dim", type=int, default=0, help="how many")
    parser.add_argument("--learning_rate", default=1.5, help="what (default: as it looks)")
    parser.add_argument("--fast", action=argparse.BooleanOptionalAction, help="whether")
    parser.add_argument("--greedy", action="store_true", help="whether")
    return parser


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--learning-rat 3", "--learning-rat: did you mean --learning_rate?"),
        ("--dimm=64", "--dimm=64: did you mean --dim?"),
        ("--dim 32 --dimm 32", "--dimm: did you mean --dim?"),
        ("--hel_", "--hel_"),  # --help is never suggested
        ("--fast my.txt", "my.txt"),
        ("--gredy 3 --foo", "--gredy: did you mean --greedy?, --foo"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_flag_that_was_meant(typed, said):
    with pytest.raises(UsageError) as error:
        parser().parse_args(typed.split())
    assert str(error.value) == f"unrecognized argument {said} (see --help)"


def test_help_shows_each_default_once_and_none_for_switches(capsys):
    parser().print_help()
    said = capsys.readouterr().out
    assert "\n    an example\n" in said
    assert "how many (default: 0)\n" in said
    assert said.count("(default:") == 2
    assert said.count("whether\n") == 2


def test_bytes_that_are_not_utf8_are_not_text():
    assert is_text("第1句 🙂")
    assert not is_text(b"a\xff".decode("utf-8", "surrogateescape"))
