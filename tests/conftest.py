"""What several test files share: a small corpus, the same packed, ways to start programs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm_ranks import WarmProcess, helper, without_launcher

from data.packing import PackingOptions, prepare

# OpenMP's threads spin while they wait for each other. Where another program wants the cores too, a
# step of a tiny model then takes a hundred times as long. Must be set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What is started in the background, or by nohup, has signals ignored, and so would all that it
# starts: tests send such signals.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 400
# After which a process is taken to hang. No test knows how fast a machine is.
SAFETY_NET_SECONDS = 900
# Everything that run_accelerate.sh and the libraries call, besides Python; no compiler, no ninja.
TOOLS = ("bash", "sh", "dirname", "basename", "env", "cat", "uname", "rm", "sed")
# What a test that was skipped says → what it needs, and what gives that.
NEEDS = {
    r"CUDA|needs a GPU": "a CUDA GPU",
    r"Chromium": "Chromium (apt-get install chromium, or CHROMIUM=path)",
    r"C\+\+ compiler": "a C++ compiler (apt-get install g++)",
    r"libaio": "libaio and a compiler (apt-get install libaio-dev g++)",
    r"only root can mount": "root, to mount a small disk",
    r"network namespaces": "root and ip (apt-get install iproute2), to make two machines of one",
    r"import '?llama_cpp": "llama-cpp-python (pip install llama-cpp-python)",
    r"import '?litgpt": "litgpt (pip install -r requirements-benchmarks.txt)",
}


def write_corpus(path: Path, documents: int = 300) -> Path:
    """A .jsonl file of small sums, some Chinese among them; deterministic, about 40 KB."""
    lines = []
    for i in range(documents):
        sums = " ".join(f"{a} + {i} = {a + i};" for a in range(1, 9))
        lines.append(f'{{"text": "sum {i}: {sums} 第{i}句\\n"}}\n')
    path.write_text("".join(lines), encoding="utf-8")
    return path


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the slow proofs in full")


def pytest_collection_modifyitems(config, items):
    """Without --all: leave out what is marked as another variant of a proof that runs anyway."""
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("variant")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter, config):
    """Say in one line what did not run, and what would run it."""
    counts = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        needed = next((needed for said, needed in NEEDS.items() if re.search(said, reason)), None)
        counts[f"need {needed}" if needed else f"say: {reason}"] += 1
    parts = [f"{n} skipped that {why}" for why, n in counts.most_common()]
    if not config.getoption("--all"):
        parts.append("variants of tests that did (bash run_tests.sh --all)")
    terminalreporter.write_line(f"\nnot run: {'; '.join(parts)}" if parts else "")


@pytest.fixture(scope="session")
def thorough(request) -> bool:
    """Whether slow proofs run in full."""
    return request.config.getoption("--all")


@pytest.fixture(scope="session")
def path_without_compilers(tmp_path_factory) -> str:
    """A PATH with this Python and a few tools. The environment's own folder holds ninja."""
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
def packed(corpus, tmp_path_factory) -> Path:
    """The corpus prepared: tokenizer and shards. Tests that damage it copy it first."""
    out = tmp_path_factory.mktemp("packed") / "sums"
    options = PackingOptions(VOCAB_SIZE, val_fraction=0.1, workers=1, skip_bad_lines=False)
    prepare([str(corpus)], out, options, progress=lambda n_bytes: None)
    return out


@pytest.fixture
def accelerator():
    """A single-process Accelerator on the CPU; the state it shares with others is forgotten."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of so many bytes; skips where that is not allowed."""
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
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def refusal(capsys):
    """Returns the one line in which a script ends because of these flags."""

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


@dataclass
class Finished:
    """A process that has ended."""

    code: int
    out: str  # stdout and stderr, as a person at a terminal sees them


def clean_environment() -> dict[str, str]:
    """This process's environment without a GPU and what a launcher may have left in it."""
    return without_launcher(os.environ)


def run(
    command: list[str],
    timeout: float = SAFETY_NET_SECONDS,
    cwd: Path = REPOSITORY,
    **environ: str,
) -> Finished:
    """Run a command in the repository, without a GPU and this process's launcher variables."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment() | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(ended.returncode, ended.stdout)


def start_warm(command: list[str], output, **environ: str) -> WarmProcess:
    """Start a command of this Python where everything has been imported, see `warm_ranks`.

    Args:
        output: an open file, for what it prints.
    """
    return helper().start(command, REPOSITORY, clean_environment() | environ, output)


def run_warm(command: list[str], **environ: str) -> Finished:
    """`run`, where everything has been imported: what a program does, not how it is started."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = start_warm(command, output, **environ)
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


def processes_with(marker: str) -> list[str]:
    """Command lines of the processes whose environment has it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


def copy_repository(folder: Path) -> Path:
    """The files that git knows, as they are now; returns the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


def launch_command(engine: str, processes: int) -> list[str]:
    """The command line up to the script's flags. Engines: plain, ddp, zero1, zero2, or a file of
    configs/."""
    if engine == "plain":
        return [sys.executable, "train_pretrain_accelerate.py"]
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    if engine == "ddp":
        launch += ["--multi_gpu"]
    elif engine == "zero1":
        launch += ["--use_deepspeed", "--zero_stage", "1"]
    else:
        default = engine == "zero2"
        launch += ["--config_file", "accelerate_config.yaml" if default else engine]
    launch += ["--num_processes", str(processes), "--main_process_port", "0"]
    return [*launch, "train_pretrain_accelerate.py"]


def deepspeed_command(config: Path, processes: int) -> list[str]:
    """The same for DeepSpeed with another file than the repository's."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed"]
    launch += ["--deepspeed_config_file", str(config), "--num_processes", str(processes)]
    return [*launch, "--main_process_port", "0", "train_pretrain_accelerate.py"]


def deepspeed_file(path: Path, **zero_optimization) -> Path:
    """The repository's file with something else in its section for ZeRO."""
    config = json.loads((REPOSITORY / "ds_config.json").read_text(encoding="utf-8"))
    config["zero_optimization"] |= zero_optimization
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


# A model of 0.04 million parameters: a step takes milliseconds.
TINY = (
    *("--dim", "32", "--n_layers", "2", "--n_heads", "4", "--max_seq_len", "32"),
    *("--log_interval", "1", "--log_with", "none", "--sample_tokens", "4"),
)


@dataclass
class Trained:
    """A run that has ended well."""

    path: Path
    out: str  # what it printed

    def rows(self, key: str = "loss") -> list[dict]:
        """The lines of metrics.jsonl that have this key."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [row for line in lines if key in (row := json.loads(line))]

    def column(self, key: str) -> list:
        """A number of every training line."""
        return [row[key] for row in self.rows()]

    def checkpoint(self, step: int | None = None) -> Path:
        """The checkpoint of a step, or the last."""
        pattern = "step-*[0-9]" if step is None else f"step-{step:08d}"
        return max((self.path / "checkpoints").glob(pattern))

    def tensors(self, file: str = "weights", step: int | None = None) -> dict:
        """A checkpoint's weights, or with "optimizer" AdamW's averages, by name."""
        from safetensors.torch import load_file

        return load_file(self.checkpoint(step) / f"{file}.safetensors")


def train(
    engine: str | list[str],
    processes: int,
    data: Path,
    path: Path,
    flags: str,
    start=run_warm,
    **environ: str,
) -> Trained:
    """Train a TINY model into the run folder `path`; fails if the run does.

    Args:
        engine: plain, ddp, zero2, or a whole command line up to the script's flags.
        start: `run` for a real launch.
    """
    command = launch_command(engine, processes) if isinstance(engine, str) else engine
    where = ["--data", str(data), "--out_dir", str(path.parent), "--run_name", path.name]
    ended = start([*command, *TINY, *where, *flags.split()], **environ)
    assert ended.code == 0, ended.out
    return Trained(path, ended.out)


def found_by(script: str, folder: Path, processes: int, engines: tuple[str, ...]) -> dict:
    """What a script of tests/integration has found out, that goes through engines in turn."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    launch += ["--num_processes", str(processes), "--main_process_port", "0"]
    path = REPOSITORY / "tests" / "integration" / script
    ended = run_warm([*launch, str(path), str(folder), *engines], PYTHONPATH=str(REPOSITORY))
    assert ended.code == 0, ended.out
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from browser import Browser, find_browser

    executable = find_browser()
    if executable is None:
        pytest.skip("needs Chromium")
    browser = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
