"""A program that cannot work prints one line with the reason and exits with code 2."""

import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
from conftest import TINY, run_warm, write_corpus

pytestmark = pytest.mark.slow

SCRIPT = "train_pretrain_accelerate.py"


@pytest.fixture
def refused(packed, tmp_path):
    """Runs training without a launcher. Training must end with an error. Returns the error line."""

    def refused(flags: str, data: Path = packed, **environ: str) -> str:
        command = [sys.executable, SCRIPT, *TINY, "--data", str(data), "--out_dir"]
        return run_warm([*command, str(tmp_path / "runs"), *flags.split()], **environ).error()

    return refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--dtype int8", "--dtype.*int8"),
        ("--dim 100 --n_heads 8", "dim 100 .*n_heads 8"),
        ("--out_dir FOLDER/file/runs", "FOLDER/file"),
        ("--data FOLDER/nothing", "FOLDER/nothing.*scripts.prepare_data"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_in_one_line(refused, tmp_path, flags, says):
    (tmp_path / "file").touch()
    flags, says = (text.replace("FOLDER", str(tmp_path)) for text in (flags, says))
    assert re.search(says, refused(flags))


def test_damage_found_during_training_ends_the_run_in_one_line(refused, packed, tmp_path):
    folder = shutil.copytree(packed, tmp_path / "damaged")
    shard = next(folder.glob("train-*.bin"))
    content = bytearray(shard.read_bytes())
    content[2000:2002] = (400).to_bytes(2, "little")
    shard.write_bytes(content)
    assert re.search("token id 400 .*vocabulary of 400", refused("", data=folder))


def test_a_port_in_use_is_an_error_of_one_line(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        line = refused("", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", **place)
    assert f"127.0.0.1:{port}" in line


def test_results_that_do_not_fit_on_the_disk_end_the_run_in_one_line(refused, small_disk):
    disk = small_disk("300k")
    assert "no space left" in refused(f"--max_steps 1 --dim 64 --out_dir {disk}")


def test_a_full_disk_ends_preparing_in_one_line(tmp_path, small_disk):
    disk, text = small_disk("24k"), write_corpus(tmp_path / "text.jsonl")
    command = [sys.executable, "-m", "scripts.prepare_data", "--data", str(text), "--out"]
    ended = run_warm([*command, str(disk / "out"), "--vocab_size", "400"])
    assert "no space left" in ended.error("prepare_data")
    assert os.listdir(disk) == [".out.lock"]  # no unfinished output
