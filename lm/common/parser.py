"""The argument parser of all programs."""

import argparse
import re

from lm.common.errors import UsageError


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep line breaks of descriptions. Add the default to a help text that does not mention it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        no_default = (None, argparse.SUPPRESS, [], "")
        is_switch = action.default is False  # off unless it is typed
        if "default" in action.help or action.default in no_default or is_switch:
            return action.help
        return f"{action.help} (default: %(default)s)"


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises UsageError for a mistake."""

    def __init__(self, **settings):
        super().__init__(formatter_class=HelpFormatter, **settings)

    def error(self, message: str):
        if flag := re.fullmatch("argument (--\\w+): expected one argument", message):
            raise UsageError(f"{message} (a value that begins with a dash: {flag[1]}=VALUE)")
        raise UsageError(f"{message} (see --help)")


def is_text(typed: object) -> bool:
    """Return True for a str without lone surrogates, which UTF-8 cannot encode."""
    return isinstance(typed, str) and not re.search("[\ud800-\udfff]", typed)
