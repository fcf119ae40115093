"""What every benchmark prints: where it ran, the command, and tables."""

import platform
import shlex
import statistics
import sys
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from common.cpu import available_cores
from common.numbers import counted

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "litgpt", "numpy", "sentencepiece")


def heading(program: str, argv: list[str] | None) -> str:
    """Date, machine and versions in a line, and the command; argv None: as it was typed."""
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
    """Rows of a cell by its column's title, the same titles in all."""
    titles = list(rows[0])
    lines = [titles, ["---"] * len(titles), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def spread(values: list[float], form: str) -> str:
    """Median, lowest and highest."""
    if not values:
        return "n/a"
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:{form}} ({low:{form}} to {high:{form}})"
