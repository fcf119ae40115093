"""What several test files share: a small corpus, the same packed, a way to start launches."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from data.packing import PackingOptions, prepare

REPOSITORY = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 400


def write_corpus(path: Path, documents: int = 300) -> Path:
    """A .jsonl file of small sums, some Chinese among them; deterministic, about 40 KB."""
    lines = []
    for i in range(documents):
        sums = " ".join(f"{a} + {i} = {a + i};" for a in range(1, 9))
        lines.append(f'{{"text": "sum {i}: {sums} 第{i}句\\n"}}\n')
    path.write_text("".join(lines), encoding="utf-8")
    return path


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


@dataclass
class Finished:
    """A process that has ended."""

    code: int
    out: str  # stdout and stderr, as a person at a terminal sees them


def run(
    command: list[str], timeout: float = 240, cwd: Path = REPOSITORY, **environ: str
) -> Finished:
    """Run a command in the repository, with the launcher's variables of this process left out."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TORCHELASTIC"))
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        clean.pop(name, None)
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=clean | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(ended.returncode, ended.stdout)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch_command(engine: str, processes: int) -> list[str]:
    """The command line up to the script's flags. Engines: plain, ddp, zero2."""
    if engine == "plain":
        return [sys.executable, "train_pretrain_accelerate.py"]
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    if engine == "ddp":
        launch += ["--multi_gpu"]
    else:
        launch += ["--config_file", "accelerate_config.yaml"]
    launch += ["--num_processes", str(processes), "--main_process_port", free_port()]
    return [*launch, "train_pretrain_accelerate.py"]
