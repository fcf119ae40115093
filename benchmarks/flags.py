"""Checks of flags that several benchmarks share: a mistake is said before anything is measured."""

import argparse
import os
import shlex
from pathlib import Path

from common.errors import UsageError


def output_file(text: str) -> Path:
    """For argparse: the path of a file that can be written.

    Raises:
        ArgumentTypeError: it cannot.
    """
    path = Path(text)
    place = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"no file can be written at {text!r}")
    return path


def training_flags(text: str) -> list[str]:
    """The words of a string of the training script's flags, split as a shell does.

    Raises:
        UsageError: a quote that is not closed, or a question for help.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}") from error
    if {"-h", "--help"} & set(words):
        raise UsageError("python train_pretrain_accelerate.py --help lists what can stand here")
    return words
