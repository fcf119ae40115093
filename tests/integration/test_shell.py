"""run_accelerate.sh in a fresh clone."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import (
    NAMED,
    SAFETY_NET_SECONDS,
    clean_environment,
    copy_repository,
    run,
    tree_of,
    wait_for,
)

pytestmark = pytest.mark.slow

TINY = "--dim 32 --n_layers 1 --n_heads 4 --max_seq_len 32 --max_steps 2 --sample_tokens 4"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the repository in a new folder."""
    return copy_repository(tmp_path_factory.mktemp("clone"))


@pytest.mark.parametrize(
    ("gpus", "visible", "refused"),
    [
        (["470.82.01"], "0", True),  # this driver does not know compute_cap
        # Drivers and compute capabilities. A hidden GPU counts too.
        (["580.65.06, 9.0", "580.65.06, 7.0"], "0", True),
        (["580.65.06, 9.0"], "0", False),
        (["550.54.15, 8.9"], "", False),  # the user trains on the CPU
        (["No devices were found"], "0", False),  # nvidia-smi fails, and prints this
    ],
)
def test_an_unusable_gpu_is_refused_before_an_installation(clone, tmp_path, gpus, visible, refused):
    smi, python = tmp_path / "nvidia-smi", tmp_path / "python"
    known = "[ $1 = --query-gpu=driver_version ]" if gpus[:1] == ["470.82.01"] else "true"
    lines = [f"{known} || exit 2", *(f"echo '{gpu}'" for gpu in gpus)]
    lines.append("exit 6" if gpus[:1] == ["No devices were found"] else "exit 0")
    smi.write_text("\n".join(["#!/bin/sh", *lines]))
    python.write_text('#!/bin/sh\n[ "$1" = -c ]\n')  # a Python without packages and without venv
    smi.chmod(0o755)
    python.chmod(0o755)
    (tmp_path / "python3").symlink_to(python)
    path = f"{tmp_path}:/usr/bin:/bin"
    environ = {"PATH": path, "CUDA_VISIBLE_DEVICES": visible, "PYTHON": ""}
    ended = run(["bash", "run_accelerate.sh"], cwd=clone, **environ)
    assert ended.code == 2
    assert ("needs an NVIDIA driver from 580 on" in ended.out) is refused
    assert ("cannot make a virtual environment" in ended.out) is not refused
    assert not (clone / ".venv").exists()


def test_a_named_python_is_used_as_it_is_and_refuses_a_mistake(tmp_path, corpus):
    folder = copy_repository(tmp_path / "clone")
    pins = folder / "requirements.txt"
    pins.write_text(re.sub("numpy==.*", "numpy==0.0.1", pins.read_text()))
    here = {"cwd": tmp_path, "PATH": "/usr/bin:/bin", "DATA": str(corpus)}
    (tmp_path / "venv").symlink_to(sys.prefix)
    typed = ["bash", "clone/run_accelerate.sh", "--dim", "7"]
    ended = run(typed, PYTHON="venv/bin/python", **here)
    others = f"numpy==0.0.1 ({version('numpy')})\n"
    assert f"venv/bin/python has other versions than requirements.txt: {others}" in ended.out
    assert "dim 7 is not divisible by n_heads 2" in ended.error("run_accelerate.sh")
    assert not (folder / "out" / "runs").exists()
    pins.write_text("numpy==0.0.1\nbase==1\n")
    ended = run(typed, PYTHON=sys.executable, **here)
    assert ended.code == 2
    assert ended.out.endswith(f"lacks base: {sys.executable} -m pip install base==1\n")
    (tmp_path / "old").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "old").chmod(0o755)
    said = run(typed, PYTHON="no-python", **here).out
    assert said == "error: PYTHON=no-python: no such program\n"
    said = run(typed, PYTHON=str(tmp_path / "old"), **here).out
    assert said == f"error: PYTHON={tmp_path}/old: Python 3.10 to 3.13 is needed\n"
    assert not (folder / ".venv").exists()


@pytest.fixture(scope="module")
def pretrained(clone, tmp_path_factory, path_without_compilers) -> Path:
    """The folder of a run named "mine" on a text named "short"."""
    text = tmp_path_factory.mktemp("text") / "short.jsonl"
    text.write_text('{"text": "very little text"}\n' * 50, encoding="utf-8")
    typed = ["bash", "run_accelerate.sh", *TINY.split(), "--run_name", "mine"]
    environ = {"PATH": path_without_compilers, "DATA": str(text), "NUM_PROCESSES": "1"}
    assert "engine: DeepSpeed ZeRO-2" in run(typed, cwd=clone, **environ).worked()
    return clone / "out" / "runs" / "mine"


def test_without_a_compiler_the_script_prepares_trains_and_leaves_a_model(clone, pretrained):
    assert (clone / "out" / "data" / "short" / "dataset.json").is_file()
    assert (pretrained / "weights" / "model.safetensors").is_file()
    # Typed flags override the flags that the script chooses.
    written = json.loads((pretrained / "settings.json").read_text(encoding="utf-8"))
    assert (written["arguments"]["max_steps"], written["model"]["dim"]) == (2, 32)
    # The script used the active environment and created none.
    assert not (clone / ".venv").exists()


def test_sft_starts_from_pretraining_and_a_signal_prints_how_to_go_on(clone, pretrained, tmp_path):
    """The note that the run is saved is not in the folder out, which this machine may not see."""
    chat, log = tmp_path / "chat.jsonl", tmp_path / "log"
    rows = [{"prompt": f"{i}?", "response": "very little"} for i in range(40)]
    chat.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    typed = ["bash", "run_accelerate.sh", "--max_steps", "100000", "--max_seq_len", "64"]
    typed += ["--sample_tokens", "4", "--log_interval", "1", "--run_name", "tuned"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"CUDA_VISIBLE_DEVICES": "-1", "MASTER_PORT": str(free.getsockname()[1])}
    stage = {"STAGE": "sft", "CHAT": str(chat)}
    environ = stage | {"ENGINE": "zero3", "NUM_PROCESSES": "2"} | place | NAMED
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    here = clean_environment() | {"PATH": path, "TMPDIR": str(tmp_path)} | environ
    with log.open("w") as file:
        process = subprocess.Popen(typed, cwd=clone, env=here, stdout=file, stderr=file)
    wait_for(lambda: "step 3/" in log.read_text(encoding="utf-8"), process)
    note = tree_of(process.pid)[-1].environ()["STOP_NOTE"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(SAFETY_NET_SECONDS) == 0
    assert note.startswith(f"{tmp_path}/")
    assert not Path(note).exists()
    said = log.read_text(encoding="utf-8")
    assert "Traceback" not in said
    assert "engine: DeepSpeed ZeRO-3\n" in said
    assert "starts from: out/runs/mine/weights, with a new optimizer\n" in said
    assert said.count("to go on:") == 1
    words, command = said.splitlines()[-2:]
    assert re.fullmatch(r"stopped by SIGTERM after step \d+, saved; to go on:", words)
    given, behind = shlex.split(command)[: len(environ)], shlex.split(command)[len(environ) :]
    assert sorted(given) == sorted(f"{name}={value}" for name, value in environ.items())
    assert behind == [*typed, "--resume", "out/runs/tuned"]
