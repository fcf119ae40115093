"""Exit with 0 if this Python has exactly the pinned versions of a requirements file.

    python scripts/check_pins.py requirements.txt
    python scripts/check_pins.py --any_version requirements.txt

With --any_version only a missing package is an error; other versions are named in one line. This
program imports only the standard library, so any Python can run it.
"""

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


def main(words: list[str]) -> str | None:
    """Return an error message, or None."""
    *flags, file = words
    path = Path(file)
    if flags != ["--any_version"]:
        return differences(path) or None
    if missing := [pin for pin, installed in unsatisfied(path).items() if installed is None]:
        command = f"{sys.executable} -m pip install {' '.join(missing)}"
        names = ", ".join(pin.partition("==")[0] for pin in missing)
        return f"error: {sys.executable} lacks {names}: {command}"
    if others := differences(path):
        print(f"{sys.executable} has other versions than {path}: {others}", file=sys.stderr)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
