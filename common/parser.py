"""The argument parser of all programs. It reports a mistake in one line."""

import argparse
import difflib
import re

from common.errors import UsageError


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep line breaks of descriptions. Add the default to a help text that does not mention it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        no_default = (None, argparse.SUPPRESS, [])
        is_switch = action.default is False  # off unless it is typed
        if "default" in action.help or action.default in no_default or is_switch:
            return action.help
        return f"{action.help} (default: %(default)s)"


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises UsageError. For an unknown flag it suggests the most similar one."""

    def __init__(self, **settings):
        super().__init__(formatter_class=HelpFormatter, **settings)

    def error(self, message: str):
        raise UsageError(f"{message} (see --help)")

    def parse_args(self, args=None, namespace=None):
        values, unknown = self.parse_known_args(args, namespace)
        # Report unknown flags, but not the words after them: these are the values of the flags.
        wrong = [word for word in unknown if word.startswith("-")] or unknown
        flags = {flag[2:] for flag in self._option_string_actions if flag.startswith("--")}
        for i, word in enumerate(wrong):
            # Compare without dashes, because dashes make any two short flags look similar.
            name = word.partition("=")[0].lstrip("-").replace("-", "_")
            if close := difflib.get_close_matches(name, flags - {"help"}, n=1):
                wrong[i] = f"{word}: did you mean --{close[0]}?"
        if wrong:
            self.error(f"unrecognized argument {', '.join(wrong)}")
        return values


def is_text(typed: object) -> bool:
    """Return True for a str that UTF-8 can encode, so without half of a surrogate pair."""
    return isinstance(typed, str) and not re.search("[\ud800-\udfff]", typed)
