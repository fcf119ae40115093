import re
from importlib.metadata import version

import pytest
from conftest import REPOSITORY
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from scripts import check_pins

PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")


def ranges_in(table: str) -> dict[str, SpecifierSet]:
    """Return name → range of versions in `table = [...]` of pyproject.toml. Python 3.10 has no
    tomllib."""
    body = re.search(rf"^{table} = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)[1]
    found = map(Requirement, re.findall(r'^\s*"([^"]+)"', body, re.MULTILINE))
    return {each.name: each.specifier for each in found}


@pytest.mark.parametrize(
    ("name", "tables"),
    [("requirements.txt", ["dependencies"]), ("requirements-dev.txt", ["dev", "formats", "serve"])],
)
def test_every_dependency_is_pinned_exactly_and_every_pin_is_a_dependency(name, tables):
    lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith(("#", "-r requirements.txt"))]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==\d+(\.\d+)+", pin)] == []
    pinned = dict(pin.split("==") for pin in pins)
    ranges = {name: each for table in tables for name, each in ranges_in(table).items()}
    assert sorted(pinned) == sorted(ranges)
    assert len(pinned) == len(pins)
    assert all(version in ranges[name] for name, version in pinned.items())


NUMPY = version("numpy")


def test_a_missing_package_or_another_version_is_reported(tmp_path):
    file = tmp_path / "requirements.txt"
    (tmp_path / "base.txt").write_text(f"# a comment\n\nbase==1\nnumpy=={NUMPY}  # and another\n")
    file.write_text("-r base.txt\nnumpy==0.0.1\n")
    assert check_pins.unsatisfied(file) == {"base==1": None, "numpy==0.0.1": NUMPY}
    with pytest.raises(SystemExit, match=rf"^base==1 \(not installed\), numpy==0.0.1 \({NUMPY}\)$"):
        check_pins.main([str(file)])


def test_a_local_build_of_the_pinned_version_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(check_pins, "version", lambda name: "2.13.0+cpu")
    (tmp_path / "r.txt").write_text("torch==2.13.0\n")
    assert check_pins.unsatisfied(tmp_path / "r.txt") == {}
