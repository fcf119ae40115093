"""Exit with 0 if this Python has exactly the pinned versions of a requirements file.

    python scripts/check_pins.py requirements.txt

This program imports only the standard library, so any Python can run it.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def unsatisfied(path: Path) -> list[str]:
    """Return the pins, also of included files, whose package is missing or has another version."""
    problems = []
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()  # without comments
        if line.startswith("-r "):
            problems += unsatisfied(path.parent / line[3:].strip())
        elif line:
            name, _, pinned = line.partition("==")
            try:
                installed = version(name).partition("+")[0]  # 2.13.0+cpu is a build of 2.13.0
            except PackageNotFoundError:
                installed = "not installed"
            if installed != pinned:
                problems.append(f"{line} ({installed})")
    return problems


if __name__ == "__main__":
    sys.exit(", ".join(unsatisfied(Path(sys.argv[1]))) or None)
