import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts import check_pins

REPOSITORY = Path(__file__).resolve().parent.parent
PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")


def names_in(table: str) -> set[str]:
    """The names in `table = [...]` of pyproject.toml; Python 3.10 has no tomllib."""
    body = re.search(rf"^{table} = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)[1]
    return set(re.findall(r'^\s*"([^"]+)"', body, re.MULTILINE))


def lines_of(name: str) -> list[str]:
    lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_dependency_is_pinned_and_every_pin_is_a_dependency():
    pinned = [line.partition("==")[0] for line in lines_of("requirements.txt")]
    assert len(pinned) == len(set(pinned))
    assert set(pinned) == names_in("dependencies")


def test_development_pins_are_the_dependencies_of_development_and_of_what_is_optional():
    include, *rest = lines_of("requirements-dev.txt")
    assert include == "-r requirements.txt"
    optional = names_in("dev") | names_in("formats") | names_in("serve")
    assert {line.partition("==")[0] for line in rest} == optional


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_pins_are_exact(name):
    pins = [line for line in lines_of(name) if not line.startswith("-r ")]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==\d+(\.\d+)+", pin)] == []


@pytest.fixture
def requirements(tmp_path):
    def write(*lines: str, name: str = "requirements.txt") -> Path:
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return tmp_path / name

    return write


def test_what_is_installed_as_pinned_is_satisfied(requirements):
    path = requirements("# a comment", "", f"numpy=={version('numpy')}  # and another")
    assert check_pins.unsatisfied(path) == []


def test_another_version_is_reported_with_the_one_installed(requirements):
    path = requirements("numpy==0.0.1")
    assert check_pins.unsatisfied(path) == [f"numpy==0.0.1 ({version('numpy')})"]


def test_a_version_that_only_begins_alike_is_another(requirements):
    path = requirements(f"numpy=={version('numpy')}0", f"pytest=={version('pytest')[:-1]}")
    assert len(check_pins.unsatisfied(path)) == 2


def test_a_missing_package_is_reported(requirements):
    path = requirements("no-such-package-here==1.0")
    assert check_pins.unsatisfied(path) == ["no-such-package-here==1.0 (not installed)"]


def test_a_local_build_of_the_version_will_do(requirements, monkeypatch):
    monkeypatch.setattr(check_pins, "version", lambda name: "2.13.0+cpu")
    assert check_pins.unsatisfied(requirements("torch==2.13.0")) == []
    assert check_pins.unsatisfied(requirements("torch==2.13.1")) == ["torch==2.13.1 (2.13.0)"]


def test_included_files_count_too(requirements):
    requirements("no-such-package-here==1.0", name="base.txt")
    path = requirements("-r base.txt", "numpy==0.0.1", name="dev.txt")
    assert [problem.split("==")[0] for problem in check_pins.unsatisfied(path)] == [
        "no-such-package-here",
        "numpy",
    ]


@pytest.mark.parametrize(("pin", "code"), [("0.0.1", 1), (version("numpy"), 0)])
def test_the_exit_code_says_whether_this_python_will_do(requirements, pin, code):
    script = REPOSITORY / "scripts" / "check_pins.py"
    command = [sys.executable, script, requirements(f"numpy=={pin}")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert ("numpy==0.0.1" in ended.stderr) == bool(code)
