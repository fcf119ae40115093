"""Fixtures and helpers of all tests: a small corpus, its prepared data, functions to start
programs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import psutil
import pytest
from warm_ranks import REPOSITORY, WarmProcess, without_launcher

from lm.common.errors import UsageError
from lm.data.corpus import parse, read_records
from lm.data.prepare import Preparation
from lm.data.tokenizer import TOKENIZER_FILE, Tokenizer
from scripts.check_pins import unsatisfied

# OpenMP's threads spin while they wait for each other. If another program uses the cores too, a
# step of a tiny model then takes a hundred times as long. This must be set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A process that was started in the background or by nohup may ignore SIGHUP, SIGQUIT or SIGINT, and
# so do its children. Tests send these signals to children.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

VOCAB_SIZE = 400
# A process that runs longer than this counts as hung, on a slow machine too.
SAFETY_NET_SECONDS = 900
# Commands that run_accelerate.sh and the libraries need, except Python. No compiler, no ninja.
TOOLS = ("bash", "sh", "dirname", "basename", "env", "cat", "uname", "rm", "sed")


def write_corpus(path: Path, documents: int = 300) -> Path:
    """Write a .jsonl file of small sums with some Chinese. 300 documents have 44 kB. The text is
    always the same."""
    lines = []
    for i in range(documents):
        sums = " ".join(f"{a} + {i} = {a + i};" for a in range(1, 9))
        lines.append(f'{{"text": "sum {i}: {sums} 第{i}句\\n"}}\n')
    path.write_text("".join(lines), encoding="utf-8")
    return path


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run variants of tests too")


def pytest_collection_modifyitems(config, items):
    """Without --all, leave out the tests that are marked as variants of other tests."""
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("variant")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def path_without_compilers(tmp_path_factory) -> str:
    """A PATH with only this Python and TOOLS. Python's folder is not in it: ninja may be there."""
    folder = tmp_path_factory.mktemp("bin")
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return str(folder)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "sums.jsonl")


@pytest.fixture(scope="session")
def texts(corpus) -> list[str]:
    """The documents of the corpus."""
    return [parse(record) for record in read_records([str(corpus)])]


def pack(source: Path, out: Path, progress=lambda n_bytes: None, **changes) -> Path:
    """Prepare a file or folder in this process; return the folder of shards. `changes` are fields
    of Preparation."""
    settings = {"vocab_size": VOCAB_SIZE, "val_fraction": 0.1, "segmentations": 1}
    Preparation(str(source), **settings | changes).write(out, progress)
    return out


@pytest.fixture(scope="session")
def packed(corpus, tmp_path_factory) -> Path:
    """The prepared corpus: tokenizer and shards. A test that damages it copies it first."""
    return pack(corpus, tmp_path_factory.mktemp("packed") / "sums")


@pytest.fixture(scope="session")
def tokenizer(packed) -> Tokenizer:
    return Tokenizer(packed / TOKENIZER_FILE)


@pytest.fixture(autouse=True)
def no_gpu(request, monkeypatch):
    """Hides the GPUs of this machine from tests without the mark "gpu" (not from fixtures of
    modules), so that these tests give the same results on every machine."""
    import torch

    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def accelerator():
    """A single-process Accelerator on the CPU. Accelerate's state is reset before and after."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def engine(accelerator):
    """The engine of a single process."""
    from lm.engine.engine import Engine

    return Engine(accelerator, "single process", deepspeed=None)


class Clock:
    """Replaces the module `time`. Only the tests change its time."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(request, monkeypatch) -> Clock:
    """Replaces `time` in the module that the test's file names as TIMED."""
    monkeypatch.setattr(request.module.TIMED, "time", Clock())
    return request.module.TIMED.time


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of the given size; skips the test where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("only root can mount a small file system here")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # files may be open


@pytest.fixture
def refusal(capsys):
    """Runs a script with flags that it refuses; returns its one error line."""

    def refusal(script, *flags) -> str:
        with pytest.raises(SystemExit) as ended:
            script.main([*map(str, flags)])
        assert ended.value.code == 2
        said = capsys.readouterr().err  # progress bars of libraries may stand before the line
        line = said.splitlines()[-1]
        assert "Traceback" not in said
        assert f"{script.__name__.rpartition('.')[2]}: error: " in line
        return line

    return refusal


def error_of(call, *args, error=UsageError, **options) -> str:
    """Make a call that must be refused; return the message of the error, which is one line."""
    with pytest.raises(error) as refused:
        call(*args, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@dataclass
class Finished:
    """A process that has ended."""

    code: int
    out: str  # stdout and stderr

    def worked(self) -> str:
        """Return the output of a program that has ended with code 0."""
        assert self.code == 0, self.out
        return self.out

    def error(self, program: str = "train_pretrain_accelerate.py") -> str:
        """Return the error line of a program that refused to start."""
        assert "Traceback" not in self.out, self.out
        assert self.code == 2, self.out
        (line,) = [line for line in self.out.splitlines() if "error:" in line]
        assert line.startswith(f"{program}: error: ")
        return line


# run_accelerate.sh has to be told to use a Python with other versions than the pins.
NAMED = {"PYTHON": sys.executable} if unsatisfied(REPOSITORY / "requirements.txt") else {}


def clean_environment() -> dict[str, str]:
    """Return this process's environment without a GPU and without a launcher's variables."""
    return without_launcher(os.environ) | NAMED


def run(command: list[str], cwd: Path = REPOSITORY, **environ: str) -> Finished:
    """Run a command in the folder `cwd`, without a GPU and without a launcher's variables."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment() | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=SAFETY_NET_SECONDS,
        check=False,
    )
    return Finished(ended.returncode, ended.stdout)


def run_warm(command: list[str], **environ: str) -> Finished:
    """Like `run`, but in a fork that has imported everything already, see `warm_ranks`."""
    with tempfile.NamedTemporaryFile("w+", encoding="utf-8") as output:
        process = WarmProcess(command, clean_environment() | environ, output)
        try:
            code = process.wait(SAFETY_NET_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.abandon()
        output.seek(0)
        said = output.read()
    assert code is not None, f"does not end:\n{said}"
    return Finished(code, said)


def wait_for(condition, *processes: subprocess.Popen | WarmProcess):
    """Wait until `condition()` is true and return its value; fail if a process ends first."""
    end = time.monotonic() + SAFETY_NET_SECONDS
    while not (value := condition()):
        assert all(process.poll() is None for process in processes) or condition(), (
            "a process ended"
        )
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return value


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def tree_of(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants. psutil's `children` compares start times, so it misses
    processes if the system's clock is changed while they run."""
    everyone = list(psutil.process_iter(["ppid"]))
    tree = [psutil.Process(pid)]
    for process in tree:  # the loop also visits the children that it appends
        tree += [each for each in everyone if each.info["ppid"] == process.pid]
    return tree


def kill_all(process: subprocess.Popen | WarmProcess) -> None:
    """Kill a process and its descendants; wait until they have ended."""
    members = tree_of(process.pid)
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(SAFETY_NET_SECONDS)
    wait_for(lambda: all(map(has_ended, members)))


def copy_repository(folder: Path) -> Path:
    """Copy the files that git tracks, as they are now; return the folder."""
    folder.mkdir(exist_ok=True)
    copy = "git ls-files -z | tar --null --files-from - --create | tar --extract --directory"
    subprocess.run(f"{copy} '{folder}'", shell=True, cwd=REPOSITORY, check=True)
    return folder


LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]


def launch_command(engine: str | Path, processes: int, *program: str) -> list[str]:
    """Return the command that starts a program, without the flags of the program.

    Args:
        engine: plain, ddp, zero1, zero2, a launcher's .yaml or a DeepSpeed .json.
        program: words after "python"; by default pretraining.
    """
    program = program or ("train_pretrain_accelerate.py",)
    if engine == "plain":
        return [sys.executable, *program]
    if engine == "ddp":
        flags = ["--multi_gpu"]
    elif engine == "zero1":
        flags = ["--use_deepspeed", "--zero_stage", "1"]
    elif str(engine).endswith(".json"):
        flags = ["--use_deepspeed", "--deepspeed_config_file", str(engine)]
    else:
        flags = ["--config_file", "accelerate_config.yaml" if engine == "zero2" else engine]
    return [*LAUNCH, *flags, "--num_processes", str(processes), *program]


INJECTED = """
import os, signal, sys, time
from pkgutil import resolve_name
sys.path.insert(0, {repository!r})
owner, _, name = {place!r}.rpartition(".")
owner, calls = resolve_name(owner), 0
original = getattr(owner, name)
def instead(*args, **options):
    global calls
    if {when}:
        calls += 1
{statements}
    return original(*args, **options)
setattr(owner, name, instead)
{before}
from {program} import main
main()
"""


def injected(
    script: Path,
    place: str,
    statements: str,
    when: str = "True",
    program: str = "train_pretrain_accelerate",
    before: str = "",
) -> str:
    """Write a script that executes the statements `before`, runs a program, and executes statements
    before each call of the function at `place`, if `when` is true. Return the path of the script.

    The statements can use `args` (of the call) and `calls` (their number, this one included).
    """
    facts = {"repository": str(REPOSITORY), "place": place, "when": when, "program": program}
    facts["before"] = before
    script.write_text(INJECTED.format(**facts, statements=indent(statements, " " * 8)))
    return str(script)


# A model of 0.04 million parameters: a step takes milliseconds.
TINY = (
    *("--dim", "32", "--n_layers", "2", "--n_heads", "4", "--max_seq_len", "32"),
    *("--log_interval", "1", "--log_with", "none", "--sample_tokens", "4"),
)


@dataclass
class Trained:
    """A run, read from its folder."""

    path: Path
    out: str  # what the run printed, or empty

    def said(self, fact: str) -> str:
        """Return the value of a line in the start block, the summary that a run prints first."""
        return re.search(rf"^ *{fact}: (.*)$", self.out, re.MULTILINE)[1]

    def samples(self) -> list[dict]:
        """Return the rows of samples.jsonl."""
        lines = (self.path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def rows(self, key: str = "loss") -> list[dict]:
        """Return the rows of metrics.jsonl that have this key."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [row for line in lines if key in (row := json.loads(line))]

    def repeatable(self) -> list[dict]:
        """Return the rows without the columns that differ between equal runs."""
        timed = ("tokens_per_second", "step_seconds", "memory_gib", "mfu")
        return [{k: v for k, v in row.items() if k not in timed} for row in self.rows("step")]

    def column(self, key: str) -> list:
        """Return the value of this key in every training row."""
        return [row[key] for row in self.rows()]

    def checkpoint(self, step: int | None = None) -> Path:
        """Return the checkpoint of this step; None: of the last step."""
        pattern = "step-*[0-9]" if step is None else f"step-{step:08d}"
        return max((self.path / "checkpoints").glob(pattern))

    def tensors(self, file: str = "weights", step: int | None = None) -> dict:
        """Return the tensors of a checkpoint's file by name; "optimizer" has the moments."""
        from safetensors.torch import load_file

        return load_file(self.checkpoint(step) / f"{file}.safetensors")

    def ends_as(self, other: "Trained", files=("weights", "optimizer", "random")) -> bool:
        """Return True if these files of both runs' last checkpoints are equal to the bit."""
        names = [f"{file}.safetensors" for file in files]
        ours, theirs = self.checkpoint(), other.checkpoint()
        return all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in names)

    def stopped_after(self, step: int, path: Path) -> Path:
        """Make and return the folder of a run that was killed after it had saved this step."""
        checkpoint = self.checkpoint(step)
        shutil.copytree(checkpoint, path / "checkpoints" / checkpoint.name)
        for name in ("metrics.jsonl", "settings.json"):
            shutil.copy(self.path / name, path)
        return path


def train_command(engine, processes: int, data: Path, path: Path, flags: str) -> list[str]:
    """Return the command that trains a TINY model into the run folder `path`.

    Args:
        engine: as in `launch_command`, or a list: the command without the flags of the program.
    """
    command = engine if isinstance(engine, list) else launch_command(engine, processes)
    where = ["--data", str(data), "--out_dir", str(path.parent), "--run_name", path.name]
    return [*command, *TINY, *where, *flags.split()]


def train(
    engine, processes: int, data: Path, path: Path, flags: str, start=run_warm, **environ: str
) -> Trained:
    """Run `train_command` and return the run. With `start=run`, nothing runs in a warm fork."""
    command = train_command(engine, processes, data, path, flags)
    return Trained(path, start(command, **environ).worked())


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from browser import Browser

    executable = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    if executable is None:
        pytest.skip("needs Chromium (apt-get install chromium, or CHROMIUM=path)")
    browser = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
