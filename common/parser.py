"""The argument parser of every program: a mistake is one line, with a guess at what was meant."""

import argparse
import difflib

from common.errors import UsageError


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep descriptions as they are; add each default that the help text does not name."""

    def _get_help_string(self, action: argparse.Action) -> str:
        named = "default" in action.help or action.default in (None, argparse.SUPPRESS, [])
        named = named or action.default is False  # of a switch, which is off unless given
        return action.help if named else f"{action.help} (default: %(default)s)"


class UnlessGiven(argparse.Action):
    """A flag whose bare form keeps a value that was given before."""

    def __call__(self, parser, namespace, value, option_string=None):
        if value or not getattr(namespace, self.dest, None):
            setattr(namespace, self.dest, value)


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises a UsageError and names the known flag that is most like a wrong one."""

    def __init__(self, **settings):
        super().__init__(formatter_class=HelpFormatter, **settings)

    def error(self, message: str):
        raise UsageError(f"{message} (see --help)")

    def parse_args(self, args=None, namespace=None):
        values, unknown = self.parse_known_args(args, namespace)
        # The words behind an unknown flag are its values; they say nothing by themselves.
        said = [word for word in unknown if word.startswith("-")] or unknown
        flags = {flag[2:] for flag in self._option_string_actions if flag.startswith("--")}
        for at, word in enumerate(said):
            # Without the dashes, which would make any two short flags look alike.
            name = word.partition("=")[0].lstrip("-").replace("-", "_")
            if close := difflib.get_close_matches(name, flags - {"help"}, n=1):
                said[at] = f"{word}: did you mean --{close[0]}?"
        if said:
            self.error(f"unrecognized argument {', '.join(said)}")
        return values


def is_text(typed: str) -> bool:
    """Return False for an argument with bytes that are not UTF-8, or a lone surrogate from JSON."""
    return not any("\ud800" <= character <= "\udfff" for character in typed)
