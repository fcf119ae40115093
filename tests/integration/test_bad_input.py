"""Whatever is wrong with a start, it ends in one line that says so, and exit code 2."""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import yaml
from conftest import (
    REPOSITORY,
    TINY,
    Finished,
    launch_command,
    run,
    run_warm,
    train,
    write_corpus,
)

pytestmark = pytest.mark.slow

SCRIPT = "train_pretrain_accelerate.py"


def the_error(ended: Finished, program: str = SCRIPT) -> str:
    """The only line of an ended process that tells of an error."""
    assert "Traceback" not in ended.out, ended.out
    assert ended.code == 2, ended.out
    (line,) = [line for line in ended.out.splitlines() if "error:" in line]
    assert line.startswith(f"{program}: error: ")
    return line


@pytest.fixture
def refused(packed, tmp_path):
    """Starts the script, or another, by itself with bad flags; returns what it says."""

    def refused(
        flags: str, data: Path = packed, script: str = SCRIPT, start=run_warm, **environ: str
    ) -> str:
        where = ["--data", str(data), "--out_dir", str(tmp_path / "runs")]
        ended = start([sys.executable, script, *TINY, *where, *flags.split()], **environ)
        return the_error(ended)

    return refused


@pytest.fixture
def damaged(packed, tmp_path):
    """A copy of the packed data, and its first training shard."""
    shutil.copytree(packed, tmp_path / "damaged")
    return tmp_path / "damaged", next((tmp_path / "damaged").glob("train-*.bin"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--dtype int8", ("--dtype", "int8", "bfloat16")),
        ("--dtype float16", ("--dtype float16", "GPU")),
        ("--dim 100 --n_heads 8", ("dim 100", "n_heads 8")),
        ("--n_heads 4 --n_kv_heads 3", ("n_heads 4", "n_kv_heads 3")),
        ("--dim 36 --n_heads 4", ("9",)),
        ("--dim 0", ("dim", "0")),
        ("--batch_size -1", ("--batch_size", "-1")),
        ("--seed 99999999999999999999999", ("--seed",)),
    ],
)
def test_flags_that_cannot_work(refused, flags, says):
    line = refused(flags)
    assert all(part in line for part in says)


def test_sequences_longer_than_the_data(refused):
    line = refused("--max_seq_len 100000")
    assert "100001" in line
    assert "--max_seq_len" in line


def test_missing_data(refused, tmp_path):
    line = refused("", data=tmp_path / "nothing", start=run)
    assert str(tmp_path / "nothing") in line
    assert "scripts.prepare_data" in line


def test_a_missing_shard(refused, damaged):
    folder, shard = damaged
    shard.unlink()
    assert shard.name in refused("", data=folder)


def test_an_empty_shard(refused, damaged):
    folder, shard = damaged
    shard.write_bytes(b"")
    assert shard.name in refused("", data=folder)


def test_a_truncated_shard(refused, damaged):
    folder, shard = damaged
    shard.write_bytes(shard.read_bytes()[:1000])
    line = refused("", data=folder)
    assert shard.name in line
    assert "1000 bytes" in line


def test_a_folder_that_is_no_prepared_data(refused, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "dataset.json").write_text('{"features": []}', encoding="utf-8")
    assert "foreign" in refused("", data=tmp_path / "foreign")


def test_a_token_outside_the_vocabulary(refused, damaged):
    folder, shard = damaged
    content = bytearray(shard.read_bytes())
    content[2000:2002] = (400).to_bytes(2, "little")
    shard.write_bytes(content)
    line = refused("", data=folder)
    assert "token id 400" in line
    assert "vocabulary of 400" in line


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_a_tracker_that_is_not_installed(refused, tracker, tmp_path):
    """A finder in front of all others hides the package where it is installed."""
    script = tmp_path / "without_it.py"
    script.write_text(
        "import importlib.util as util, sys\n"
        f"sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "find_spec = util.find_spec\n"
        f"util.find_spec = lambda name, *rest: None if name == {tracker!r} "
        "else find_spec(name, *rest)\n"
        "from train_pretrain_accelerate import main\n"
        "main()\n",
        encoding="utf-8",
    )
    assert f"pip install {tracker}" in refused(f"--log_with {tracker}", script=str(script))


def test_the_name_of_a_run_that_exists(refused, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "metrics.jsonl").touch()
    line = refused("--run_name mine")
    assert "--resume auto" in line


def test_a_folder_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(f"--out_dir {tmp_path / 'file' / 'runs'}")


def test_nothing_to_resume(refused, tmp_path):
    assert f"--resume {tmp_path}" in refused(f"--resume {tmp_path}")


def test_a_port_that_is_in_use(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        line = refused("", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", **place)
    assert f"127.0.0.1:{port}" in line


def test_a_precision_of_the_launcher_that_contradicts_the_flag(refused):
    line = refused("--dtype bfloat16", ACCELERATE_MIXED_PRECISION="fp16")
    assert "--mixed_precision fp16" in line
    assert "bfloat16" in line


def test_a_deepspeed_file_that_is_not_json(refused, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text("{'stage': 2}", encoding="utf-8")
    line = refused("", ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path))
    assert str(path) in line
    assert "not JSON" in line


def test_deepspeed_without_a_launcher(refused):
    """Its processes do not know each other: RANK and the rest are missing."""
    line = refused(
        "",
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE=str(REPOSITORY / "ds_config.json"),
    )
    assert "DeepSpeed is asked for without a launcher" in line


def test_a_full_disk_while_training(refused, small_disk):
    disk = small_disk("300k")
    assert "no space left" in refused(f"--max_steps 1 --dim 64 --out_dir {disk}")


@pytest.mark.variant  # of tests/test_deepspeed_config.py
def test_a_contradiction_is_readable_below_the_launchers_own_page(packed, tmp_path):
    config = json.loads((REPOSITORY / "ds_config.json").read_text(encoding="utf-8"))
    config["gradient_accumulation_steps"] = 8
    (tmp_path / "ds.json").write_text(json.dumps(config), encoding="utf-8")
    launch = yaml.safe_load((REPOSITORY / "accelerate_config.yaml").read_text(encoding="utf-8"))
    launch["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "ds.json")
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(launch), encoding="utf-8")
    command = launch_command("zero2", 2)
    command[command.index("accelerate_config.yaml")] = str(tmp_path / "launch.yaml")
    where = ["--data", str(packed), "--out_dir", str(tmp_path / "runs")]
    ended = run([*command, *TINY, *where, "--accumulation_steps", "4"])
    assert ended.code != 0
    # Where rank 0 starts much later, the other rank may be the one that says it.
    line = next(line for line in ended.out.splitlines() if line.startswith(SCRIPT))
    assert ": error: " in line
    assert f"{tmp_path / 'ds.json'} says" in line
    assert '"gradient_accumulation_steps": 8' in line
    assert "--accumulation_steps gives 4" in line
    assert not (tmp_path / "runs").exists()


RANK_1_ELSEWHERE = """
import os, sys
sys.path.insert(0, {repository!r})
if os.environ["RANK"] == "1":
    os.chdir({folder!r})
from train_pretrain_accelerate import leave, main
try:
    main()
finally:
    leave()
"""


@pytest.mark.parametrize("what", ["data", "checkpoint", "weights"])
def test_what_one_rank_cannot_see_is_said_by_the_first_with_its_place(packed, tmp_path, what):
    """A relative path stands for a disk that one of two machines does not have."""
    out = os.path.relpath(tmp_path, REPOSITORY)
    run_1 = train("plain", 1, packed, tmp_path / "run", "--max_steps 1")
    data, missing, flags = {
        "data": (os.path.relpath(packed, REPOSITORY), "no prepared data here", ""),
        "checkpoint": (packed, "cannot be used", "--resume auto --run_name run"),
        "weights": (packed, "model.safetensors", f"--init_from {out}/run"),
    }[what]
    script = tmp_path / "rank_1_elsewhere.py"
    script.write_text(RANK_1_ELSEWHERE.format(repository=str(REPOSITORY), folder=str(run_1.path)))
    command = [*launch_command("ddp", 2)[:-1], str(script), *TINY, "--data", str(data)]
    batch = ["--batch_size", "4", "--max_steps", "2", "--out_dir", out]
    ended = run_warm([*command, *batch, *flags.split()])
    assert ended.code == 1
    assert "Traceback" not in ended.out
    line = next(line for line in ended.out.splitlines() if "error: " in line)
    assert line.startswith(f"{SCRIPT}: error: ")
    assert missing in line
    assert f"(only rank 1 on {socket.gethostname()} of 2 processes: " in line


@pytest.fixture
def prepare(tmp_path):
    """Prepares the file of lines given."""

    def prepare(lines: list[bytes], *flags: str, out: Path = tmp_path / "out") -> Finished:
        path = write_corpus(tmp_path / "text.jsonl")
        path.write_bytes(path.read_bytes() + b"\n".join(lines) + b"\n")
        command = [sys.executable, "-m", "scripts.prepare_data", "--vocab_size", "400"]
        return run_warm([*command, "--data", str(path), "--out", str(out), *flags])

    return prepare


GOOD = b'{"text": "good"}'


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b'{"text": "unfinished', "not JSON"),
        (b'{"text": "\xff\xfe"}', "not valid UTF-8"),
        (b'{"title": "no text"}', 'no "text"'),
        (b'{"text": 5}', 'no "text"'),
        (b'["text"]', 'no "text"'),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(prepare, tmp_path, bad, says):
    line = the_error(prepare([GOOD, bad, GOOD]), "prepare_data")
    assert f"{tmp_path / 'text.jsonl'}, line 302: " in line
    assert says in line
    assert not (tmp_path / "out").exists()


def test_bad_lines_are_counted_when_asked_to_go_on(prepare, tmp_path):
    ended = prepare([b"{", GOOD, b'{"text": "\xff"}'], "--skip_bad_lines", "--segmentations", "1")
    assert ended.code == 0, ended.out
    assert "skipped 2 bad documents" in ended.out
    assert "line 301" in ended.out
    description = json.loads((tmp_path / "out" / "dataset.json").read_text(encoding="utf-8"))
    assert sum(split["documents"] for split in description["splits"].values()) == 301


def test_a_full_disk_while_preparing(prepare, small_disk):
    disk = small_disk("24k")
    ended = prepare([GOOD], out=disk / "out")
    assert "no space left" in the_error(ended, "prepare_data")
    assert os.listdir(disk) == []
