"""Flags of the benchmarks: what cannot work is said before anything is measured."""

import argparse
from collections.abc import Callable, Iterable

from common.parser import OneLineParser


def new_parser(program: str, text: str) -> OneLineParser:
    return OneLineParser(prog=f"python -m {program}", description=text, allow_abbrev=False)


def at_least(least: int) -> Callable[[str], int]:
    """A whole number from `least` on."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"whole numbers from {least} on, not {text!r}")
        return int(text)

    return parse


def numbers(least: int) -> Callable[[str], list[int]]:
    """Such numbers with commas between them; what is named twice is measured once."""
    return lambda text: list(dict.fromkeys(map(at_least(least), text.split(","))))


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Some of the known names, with commas between them."""

    def parse(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",")]
        if wrong := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
        return found

    return parse
