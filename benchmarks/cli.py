"""Functions for all benchmarks: flags, a heading with machine and command, Markdown tables."""

import os
import platform
import shlex
import statistics
import sys
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lm.common.numbers import available_cores, counted
from lm.common.parser import OneLineParser

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "litgpt", "numpy", "sentencepiece")
LAUNCHERS = ("ACCELERATE_", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")


def new_parser(program: str, text: str) -> OneLineParser:
    return OneLineParser(prog=f"python -m {program}", description=text, allow_abbrev=False)


def say(text: str) -> None:
    """Report progress on stderr; tables go to stdout."""
    print(text, file=sys.stderr, flush=True)


def clean_environment() -> dict[str, str]:
    """Return this environment without a launcher's variables, with Python's folder on PATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    tools = Path(sys.executable).parent  # DeepSpeed looks for ninja on PATH
    return kept | {"PATH": f"{tools}{os.pathsep}{kept.get('PATH', '')}"}


def heading(program: str, argv: list[str] | None) -> str:
    """Return a heading with date, machine, versions and command.

    Args:
        argv: the flags; None takes them from sys.argv.
    """
    import torch  # takes seconds

    about = [
        str(date.today()),
        f"{cpu_name()}, {counted(available_cores(), 'cores')}",
        torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        f"{platform.system()}, Python {platform.python_version()}",
    ]
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            about.append(f"{name} {version(name)}")
    words = sys.argv[1:] if argv is None else argv
    command = f"python -m {program} {shlex.join(words)}".strip()
    return f"{', '.join(about)}.\n\n    {command}"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8", "replace").splitlines() if info.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def table(rows: list[dict]) -> str:
    """Return a Markdown table; each row maps the titles of the columns to cells."""
    titles = list(rows[0])
    lines = [titles, ["---"] * len(titles), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def spread(values: list[float], form: str) -> str:
    """Return "median (lowest to highest)", each in the format `form`."""
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:{form}} ({low:{form}} to {high:{form}})"
