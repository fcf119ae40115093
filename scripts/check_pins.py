"""Exit 0 if this Python has every package of a requirements file in exactly the version pinned
there.

    python scripts/check_pins.py requirements.txt

Uses the standard library alone, and is run with whatever Python is at hand to find out whether it
will do.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def pins(path: Path) -> dict[str, str]:
    """name → version of a requirements file and those that it includes."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            found |= pins(path.parent / line[3:].strip())
        elif line:
            name, _, pinned = line.partition("==")
            found[name] = pinned
    return found


def unsatisfied(path: Path) -> list[str]:
    """What is missing or of another version, for people to read."""
    problems = []
    for name, pinned in pins(path).items():
        try:
            installed = version(name).partition("+")[0]  # 2.13.0+cpu is a build of 2.13.0
        except PackageNotFoundError:
            installed = "not installed"
        if installed != pinned:
            problems.append(f"{name}=={pinned} ({installed})")
    return problems


if __name__ == "__main__":
    sys.exit(", ".join(unsatisfied(Path(sys.argv[1]))) or None)
