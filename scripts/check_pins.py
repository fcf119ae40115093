"""Exit with 0 if this Python has exactly the pinned versions of a requirements file.

    python scripts/check_pins.py requirements.txt
    python scripts/check_pins.py --any_version requirements.txt

With --any_version only a missing package is an error; other versions are named in one line. This
program imports only the standard library, so any Python can run it.
"""

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def unsatisfied(path: Path) -> dict[str, str | None]:
    """Return the pins, also of included files, that this Python does not satisfy, each with the
    installed version of its package, or None without the package."""
    problems = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()  # without comments
        if line.startswith("-r "):
            problems |= unsatisfied(path.parent / line[3:].strip())
        elif line:
            name, _, pinned = line.partition("==")
            try:
                installed = version(name)
            except PackageNotFoundError:
                installed = None
            # 2.13.0+cpu is a build of 2.13.0.
            if installed is None or installed.partition("+")[0] != pinned:
                problems[line] = installed
    return problems


def differences(path: Path) -> str:
    """Return the unsatisfied pins and what is installed: "numpy==2.2.6 (2.4.0)"."""
    found = unsatisfied(path).items()
    return ", ".join(f"{pin} ({installed or 'not installed'})" for pin, installed in found)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--any_version", action="store_true", help="only refuse missing packages")
    options = parser.parse_args(argv)
    others = differences(options.file)
    if not options.any_version:
        sys.exit(others or None)
    missing = [pin for pin, installed in unsatisfied(options.file).items() if installed is None]
    if missing:
        names = ", ".join(pin.partition("==")[0] for pin in missing)
        command = f"{sys.executable} -m pip install {' '.join(missing)}"
        sys.exit(f"error: {sys.executable} lacks {names}: {command}")
    if others:
        print(f"{sys.executable} has other versions than {options.file}: {others}", file=sys.stderr)


if __name__ == "__main__":
    main()
