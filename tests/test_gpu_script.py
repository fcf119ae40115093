import os
import shutil
import subprocess
from itertools import pairwise

import pytest
from conftest import REPOSITORY, clean_environment

needs_timeout = pytest.mark.skipif(not shutil.which("timeout"), reason="no coreutils")
pytestmark = [pytest.mark.slow, needs_timeout]

STUB = """#!/bin/sh
echo "table of $*"
echo "progress of $2" >&2
case "$*" in *"$FAILING"*) echo "no room" >&2; exit 3;; esac
"""


def run_script(tmp_path, failing: str, **variables) -> tuple[subprocess.CompletedProcess, str]:
    """The script with a Python that fails where its command line holds `failing`; and its
    report."""
    python = tmp_path / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    ended = subprocess.run(
        ["bash", "benchmarks/gpu.sh", str(tmp_path / "report")],
        cwd=REPOSITORY,
        env=clean_environment() | {"PYTHON": str(python), "FAILING": failing} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return ended, (tmp_path / "report" / "gpu.md").read_text()


def test_every_part_goes_into_one_report_and_onto_the_terminal(tmp_path):
    ended, report = run_script(tmp_path, failing="nothing")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == report
    parts = [line[2:] for line in report.splitlines() if line.startswith("# ")]
    own = ["104m", "360m", "104m, accumulation 4"]
    assert parts == [*own, "Tests on the GPU", "104m, peers"]
    assert report.count("table of -m benchmarks.throughput") == 4
    assert "table of -m pytest -v --durations=10 -m gpu tests" in report
    assert "FAILED" not in report
    assert "progress of benchmarks.throughput" in ended.stderr
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["gpu.md"]


def test_a_part_that_fails_leaves_its_last_words_and_the_others_go_on(tmp_path):
    ended, report = run_script(tmp_path, failing="-m pytest")
    assert ended.returncode == 1
    assert report.count("FAILED") == 1
    assert "FAILED (exit code 3): progress of pytest\nno room\n" in report
    assert report.count("table of -m benchmarks.throughput") == 4


def test_where_everything_fails_every_part_says_so(tmp_path):
    ended, report = run_script(tmp_path, failing="-m")
    assert ended.returncode == 1
    assert report.count("FAILED (exit code 3)") == 5


def test_a_part_ends_in_time_for_the_next_and_leaves_them_what_it_does_not_need(tmp_path):
    # In the place of coreutils' `timeout`: notes its limit and runs the command.
    timeout = tmp_path / "timeout"
    timeout.write_text(f'#!/bin/sh\necho "$3" >>{tmp_path}/limits\nshift 3\nexec "$@"\n')
    timeout.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    run_script(tmp_path, failing="nothing", PATH=path)
    limits = [int(line) for line in (tmp_path / "limits").read_text().split()]
    assert len(limits) == 5
    assert all(a < b for a, b in pairwise([0, *limits, 521]))


def test_the_commands_are_ones_that_the_benchmark_understands(tmp_path):
    from benchmarks.throughput import parse_options

    _, report = run_script(tmp_path, failing="nothing")
    start = "table of -m benchmarks.throughput "
    commands = [line.removeprefix(start) for line in report.splitlines() if line.startswith(start)]
    for command in commands:
        options = parse_options(command.split())
        assert len(options.contenders) >= 2
        assert options.contenders[0].name == "ours-compiled"
