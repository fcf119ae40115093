import errno
import os
import signal
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from common import errors
from common.errors import EXIT_CODE, UsageError, one_line_errors


class OtherError(Exception):
    pass


def ended_by(error: Exception, capsys, *expected: type[Exception]) -> str:
    """What a program says on stderr when this error ends it with exit code 2."""
    with pytest.raises(SystemExit) as ended, one_line_errors("prog", *expected):
        raise error
    assert ended.value.code == EXIT_CODE == 2
    return capsys.readouterr().err


def test_an_expected_error_is_one_line_on_stderr(capsys):
    assert ended_by(UsageError("--dim is 7"), capsys, UsageError) == "prog: error: --dim is 7\n"


def test_subclasses_of_what_is_expected_count(capsys):
    assert ended_by(UsageError("x"), capsys, ValueError) == "prog: error: x\n"


def test_an_error_that_brings_a_traceback_along_is_still_one_line(capsys):
    said = ended_by(UsageError("Traceback ...\n  File x\n\nthe reason\n"), capsys, UsageError)
    assert said == "prog: error: the reason\n"


def test_an_error_without_words_does_not_become_another_error(capsys):
    assert ended_by(UsageError(), capsys, UsageError).startswith("prog: error:")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_whatever_was_expected(capsys, code):
    said = ended_by(OSError(code, os.strerror(code), "out/x.bin"), capsys)
    assert said.startswith("prog: error: no space left on the disk: ")
    assert "out/x.bin" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("error", [OtherError("boom"), OSError(errno.EIO, "input/output error")])
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error)), one_line_errors("prog", UsageError):
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0)])
def test_interrupts_and_exits_pass_through(error):
    with pytest.raises(type(error)), one_line_errors("prog", Exception):
        raise error


def test_no_error_no_word(capsys):
    with one_line_errors("prog", UsageError):
        pass
    assert capsys.readouterr() == ("", "")


PROGRAM = """
from common.errors import UsageError, one_line_errors
with one_line_errors("prog", UsageError):
"""
WRITES = """
    for number in range(100_000):
        print(number, flush={flush})
"""
FAILS = """
    print(0, flush=True)
    input()  # until nobody reads any more
    print(1)
    raise UsageError("x")
"""


def command(lines: str) -> dict:
    """A program, for `subprocess`, whose output is buffered as it is for most people."""
    environ = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    return {"args": [sys.executable, "-c", PROGRAM + lines], "cwd": REPOSITORY, "env": environ}


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        (WRITES.format(flush=True), 141, b""),
        (WRITES.format(flush=False), 141, b""),
        (FAILS, 2, b"prog: error: x\n"),
    ],
)
def test_a_reader_that_has_seen_enough_ends_a_program_with_no_word_but_its_error(lines, code, says):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(**command(lines), **pipes) as process:
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.communicate(b"\n")[1] == says
    assert process.returncode == code


@pytest.mark.parametrize(
    ("output", "lines", "code", "says"),
    [
        (">&-", "print(1)", 0, ""),
        (">&-", "raise UsageError('x')", 2, "prog: error: x\n"),
        (">/dev/full", "print(1)", 2, "prog: error: no space left on the disk: "),
        (">/dev/full", "print(1); raise UsageError('x')", 2, "prog: error: x\n"),
    ],
)
def test_output_that_is_closed_or_full_leaves_no_traceback(output, lines, code, says):
    program = command(f"    {lines}")
    program["args"] = ["sh", "-c", f'exec "$@" {output}', "sh", *program["args"]]
    ended = subprocess.run(**program, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr[: len(says)]) == (code, says)
    assert ended.stderr.count("\n") == bool(says)


def test_another_pipe_that_breaks_keeps_its_traceback():
    with pytest.raises(BrokenPipeError), one_line_errors("prog", UsageError):
        raise BrokenPipeError(errno.EPIPE, "a worker's")


def test_a_machines_first_rank_speaks_first_and_others_say_who_they_are(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "0")
    assert ended_by(UsageError("x"), capsys, UsageError) == "prog: error: x\n"
    assert waited == []
    monkeypatch.setattr(errors.signal, "signal", lambda *handler: waited.append(handler))
    monkeypatch.setenv("RANK", "3")
    assert ended_by(UsageError("x"), capsys, UsageError) == "prog (rank 3): error: x\n"
    # Meanwhile the launcher may end it.
    assert waited[0] == (signal.SIGTERM, signal.SIG_DFL)
    assert waited[1] > 0
    # The first of another machine has a launcher of its own.
    waited.clear()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ended_by(UsageError("x"), capsys, UsageError) == "prog (rank 3): error: x\n"
    assert waited == []


def stopped(capsys, monkeypatch, terminal: bool) -> str:
    """What a program says on stderr when Ctrl-C ends it."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/scripts/prog.py", "--flag"])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with pytest.raises(SystemExit) as ended:
        errors.end_in_one_line(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert ended.value.code == 130
    return capsys.readouterr().err


def test_ctrl_c_ends_a_program_with_one_line_below_what_the_terminal_echoed(capsys, monkeypatch):
    assert stopped(capsys, monkeypatch, terminal=False) == "prog: stopped\n"
    assert stopped(capsys, monkeypatch, terminal=True) == "\nprog: stopped\n"


def test_only_ctrl_c_loses_its_traceback(capsys):
    errors.end_in_one_line(OtherError, OtherError("boom"), None)
    assert capsys.readouterr().err.endswith("OtherError: boom\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "program"),
    [
        (("-m", "scripts.prepare_data"), "prepare_data"),
        (("-m", "scripts.export_hf", "auto", "out"), "export_hf"),
        (("-m", "training.preflight"), "preflight"),
        (("train_pretrain_accelerate.py",), "train_pretrain_accelerate"),
    ],
)
def test_ctrl_c_while_a_program_is_being_imported_is_one_line(tmp_path, command, program):
    """A numpy and a torch that interrupt as the keys would: each program imports one of them."""
    (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (130, f"{program}: stopped\n")
