import errno
import os
import signal
import subprocess
import sys

import pytest
from conftest import REPOSITORY, clean_environment, run

from lm.common import errors
from lm.common.errors import (
    EXIT_CODE,
    LAUNCHER_ENDED,
    MARKS,
    UsageError,
    end_with_launcher,
    one_line_errors,
)


def ended_by(error: Exception, capsys, *expected: type[Exception]) -> str:
    """Let this error end a program with exit code 2; return what the program prints on stderr."""
    with pytest.raises(SystemExit) as ended, one_line_errors("prog", *expected):
        raise error
    assert ended.value.code == EXIT_CODE == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UsageError("--dim is 7"), "--dim is 7\n"),
        (UsageError("Traceback ...\n  File x\n\nthe reason\n"), "the reason\n"),
        (UsageError(), "UsageError\n"),
        (OSError(errno.ENOSPC, "full", "out/x"), "no space left on the disk: [Errno 28] full: 'o"),
    ],
)
def test_an_expected_error_or_a_full_disk_prints_one_line_on_stderr(capsys, error, said):
    line = ended_by(error, capsys, ValueError)  # UsageError is a ValueError
    assert line.startswith(f"prog: error: {said}")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [KeyError("boom"), BrokenPipeError(errno.EPIPE, "a worker's pipe, not stdout")],
)
def test_other_errors_pass_through(error):
    with pytest.raises(type(error)), one_line_errors("prog", UsageError):
        raise error


PROGRAM = """
from lm.common.errors import UsageError, one_line_errors
with one_line_errors("prog", UsageError):
"""
WRITES = """
    for number in range(100_000):
        print(number)
"""
FAILS = """
    print(0, flush=True)
    input()  # waits until the reader has closed the pipe
    print(1)
    raise UsageError("x")
"""


def command(lines: str) -> dict:
    """Return arguments for `subprocess` that run these lines with Python's usual buffering."""
    environ = os.environ | {"PYTHONUNBUFFERED": ""}
    return {"args": [sys.executable, "-c", PROGRAM + lines], "cwd": REPOSITORY, "env": environ}


@pytest.mark.parametrize(
    ("lines", "code", "says"), [(WRITES, 141, b""), (FAILS, 2, b"prog: error: x\n")]
)
def test_a_program_whose_reader_closed_the_pipe_prints_only_its_own_error(lines, code, says):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(**command(lines), **pipes) as process:
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.communicate(b"\n")[1] == says
    assert process.returncode == code


@pytest.mark.parametrize("encoding", ["gbk", "ascii", "iso-8859-1"])
def test_characters_that_stdout_cannot_encode_are_printed_as_escapes(encoding):
    program = command("    print('语言 \\ufffd')")
    program["env"]["PYTHONIOENCODING"] = encoding
    ended = subprocess.run(**program, capture_output=True)
    words = "语言" if encoding == "gbk" else r"\u8bed\u8a00"
    assert (ended.stdout.decode(encoding), ended.stderr) == (rf"{words} \ufffd" + "\n", b"")


def test_libraries_read_their_files_as_utf_8_in_every_locale():
    program = "import lm.common; print(open('/dev/null').encoding)"
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert run([sys.executable, "-c", program], **environ).out.lower() == "utf-8\n"


@pytest.mark.parametrize(
    ("output", "lines", "code", "says"),
    [
        (">&-", "raise UsageError('x')", 2, "prog: error: x\n"),
        (">/dev/full", "print(1)", 2, "prog: error: no space left on the disk: "),
        (">/dev/full", "print(1); raise UsageError('x')", 2, "prog: error: x\n"),
    ],
)
def test_output_that_is_closed_or_full_leaves_no_traceback(output, lines, code, says):
    program = [sys.executable, "-c", f"{PROGRAM}    {lines}"]
    ended = run(["sh", "-c", f'exec "$@" {output}', "sh", *program], PYTHONUNBUFFERED="")
    assert (ended.code, ended.out[: len(says)]) == (code, says)
    assert ended.out.count("\n") == 1


def test_a_machines_first_rank_prints_its_error_at_once_and_other_ranks_wait(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setattr(errors.signal, "signal", lambda *handler: waited.append(handler))
    monkeypatch.setenv("RANK", "0")
    assert ended_by(UsageError("x"), capsys, UsageError) == "prog: error: x\n"
    assert waited == []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first rank of another machine
    assert ended_by(UsageError("x"), capsys, UsageError) == "prog (rank 3): error: x\n"
    assert waited == []
    monkeypatch.delenv("LOCAL_RANK")
    assert ended_by(UsageError("x"), capsys, UsageError) == "prog (rank 3): error: x\n"
    assert waited[0] == (signal.SIGTERM, signal.SIG_DFL)  # the launcher may end the process
    assert waited.pop() > 0


@pytest.mark.slow
def test_ctrl_c_during_the_imports_prints_one_line(tmp_path):
    """A module of the test replaces torch. Importing it raises KeyboardInterrupt, like Ctrl-C."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    ended = run([sys.executable, "train_pretrain_accelerate.py"], PYTHONPATH=str(tmp_path))
    assert (ended.code, ended.out) == (130, "train_pretrain_accelerate: stopped\n")


CHILD = """
import lm.common, os, time
parent = os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(0.3)
print("lives on", flush=True)
"""
LAUNCH = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can send this signal")
@pytest.mark.parametrize("mark", [*MARKS, "RANK", "ACCELERATE_MIXED_PRECISION"])
def test_a_process_ends_with_its_launcher_but_not_with_its_shell(mark):
    """RANK and the precision may be set by a user whose shell starts the program."""
    environ = {k: v for k, v in clean_environment().items() if k not in MARKS} | {mark: "1"}
    start = {"cwd": REPOSITORY, "env": environ, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LAUNCH], **start) as parent:
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.read() == ("" if mark in MARKS else "lives on\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can send this signal")
def test_a_launcher_that_has_just_ended_is_noticed(monkeypatch):
    parents, raised = iter([7, 1]), []
    monkeypatch.setenv(MARKS[0], "1")
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    monkeypatch.setattr(errors.ctypes, "CDLL", lambda name: errors)
    monkeypatch.setattr(errors, "prctl", lambda *_: None, raising=False)
    end_with_launcher()
    assert raised == [LAUNCHER_ENDED]
