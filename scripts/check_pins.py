"""Exit 0 if this Python has every package of a requirements file in exactly its pinned version.

    python scripts/check_pins.py requirements.txt

It uses the standard library alone, so that any Python can be asked whether it will do.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def unsatisfied(path: Path) -> list[str]:
    """List what is missing or of another version, here and in the files that are included."""
    problems = []
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
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
