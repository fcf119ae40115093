"""DeepSpeed's launcher, torchrun and none: the engines that they start, with files of this project
and of others, and the losses, which are those of `accelerate launch`."""

import json
import re
import socket
import subprocess
import sys
import tempfile
from functools import reduce
from pathlib import Path

import pytest
from conftest import (
    REPOSITORY,
    SAFETY_NET_SECONDS,
    TINY,
    Trained,
    run,
    run_warm,
    start_warm,
    train,
)

pytestmark = pytest.mark.slow

SCRIPT = "train_pretrain_accelerate.py"
FLAGS = "--max_steps 6 --batch_size 2 --dtype float32 --lr_schedule constant --warmup_steps 3"
FIXTURES = REPOSITORY / "tests" / "fixtures" / "deepspeed"


@pytest.fixture(scope="module")
def accelerate(packed, tmp_path_factory) -> dict[str, Trained]:
    """Two processes of `accelerate launch`, by engine."""
    folder = tmp_path_factory.mktemp("accelerate")
    engines = {"ddp": "ddp", "zero2": "zero2", "zero3": "configs/zero3.yaml"}
    return {
        name: train(engine, 2, packed, folder / name, FLAGS) for name, engine in engines.items()
    }


@pytest.fixture
def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture
def ranks(packed, tmp_path, port):
    """Trains on two processes that have been started one by one."""

    def start(flags: str, each, **environ: str) -> Trained:
        """`each`: (more environment, words behind the script) of a rank."""
        where = ["--data", str(packed), "--out_dir", str(tmp_path), "--run_name", "ranks"]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            processes = []
            for rank in range(2):
                more, words = each(rank)
                command = [sys.executable, "-u", SCRIPT, *words, *TINY, *where, *flags.split()]
                mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(start_warm(command, output, **environ, **place, **mine, **more))
            try:
                codes = [process.wait(SAFETY_NET_SECONDS) for process in processes]
            except subprocess.TimeoutExpired:
                codes = []
            finally:
                for process in processes:
                    process.abandon()
            output.seek(0)
            said = output.read()
        assert codes == [0, 0], said
        return Trained(tmp_path / "ranks", said)

    return start


def by_deepspeed(rank: int):
    """As deepspeed/launcher/launch.py starts a rank; the real launch below holds that to be so."""
    return {"LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}, [f"--local_rank={rank}"]


def by_torchrun(rank: int):
    return {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, []


def engine(trained: Trained) -> str:
    return re.search(r"^ *engine: (.*)$", trained.out, re.MULTILINE)[1]


def test_the_deepspeed_launcher_trains_as_accelerates_does(accelerate, packed, tmp_path, port):
    """A real launch, as its users type it: a hostfile, a port, --deepspeed --deepspeed_config."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=66\n", encoding="utf-8")
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    command += ["--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1"]
    # It makes GPUs visible by their number, and none has these: this runs on a CPU everywhere.
    command += ["--include", "localhost:64,65", "--master_port", port, SCRIPT]
    command += ["--deepspeed", "--deepspeed_config", "ds_config.json"]
    trained = train(command, 2, packed, tmp_path / "run", FLAGS, start=run)
    assert engine(trained) == "DeepSpeed ZeRO-2"
    assert re.search(r"processes: 2 \(gloo\)", trained.out)
    threads = re.compile(r"(\d+) threads? per process")
    assert threads.search(trained.out)[1] == threads.search(accelerate["zero2"].out)[1]
    assert trained.column("loss") == accelerate["zero2"].column("loss")


def test_without_a_file_it_starts_ddp_and_says_which_flag_gives_deepspeed(accelerate, ranks):
    trained = ranks(FLAGS, by_deepspeed)
    assert engine(trained).startswith("DDP, not DeepSpeed")
    assert "--deepspeed ds_config.json" in engine(trained)
    assert trained.column("loss") == accelerate["ddp"].column("loss")


def test_torchrun_starts_deepspeed_as_well(accelerate, ranks):
    trained = ranks(f"{FLAGS} --deepspeed ds_config.json", by_torchrun)
    assert engine(trained) == "DeepSpeed ZeRO-2"
    assert trained.column("loss") == accelerate["zero2"].column("loss")


@pytest.mark.parametrize(
    ("name", "told", "stage"),
    [
        ("accelerate_zero2_student", {}, 2),  # a scheduler with "auto", as the flags say
        ("hugging_face_zero3", {"scheduler": ..., "optimizer.params.torch_adam": True}, 3),
    ],
)
def test_a_template_of_others_trains_as_our_own_file(
    accelerate, ranks, tmp_path, name, told, stage
):
    """Once what it is told has been changed in it; no compiler is needed then."""
    config = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    for key, value in told.items():
        *parents, last = key.split(".")
        section = reduce(dict.__getitem__, parents, config)
        section[last] = value
        if value is ...:
            del section[last]
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    trained = ranks(f"{FLAGS} --deepspeed {path}", by_deepspeed)
    assert engine(trained).startswith(f"DeepSpeed ZeRO-{stage}")
    assert "on the CPU" in engine(trained)
    losses = accelerate[f"zero{stage}"].column("loss")
    assert trained.column("loss") == pytest.approx(losses, abs=1e-5)
    used = json.loads((trained.path / "settings.json").read_text(encoding="utf-8"))["deepspeed"]
    assert "auto" not in json.dumps(used)


def test_a_debugger_steps_through_one_deepspeed_process(packed, tmp_path):
    """launch.json of the README: its program with its arguments, and without the debugger."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    launch = json.loads(re.search(r"```json\n(.*?)```", readme, re.DOTALL)[1])
    (configuration,) = launch["configurations"]
    assert configuration["request"] == "launch"
    program = Path(configuration["program"].replace("${workspaceFolder}", str(REPOSITORY)))
    assert program == REPOSITORY / SCRIPT
    assert configuration["cwd"] == "${workspaceFolder}"
    where = ["--data", str(packed), "--out_dir", str(tmp_path), "--run_name", "run", *TINY]
    ended = run_warm([sys.executable, str(program), *configuration["args"], *where])
    assert ended.code == 0, ended.out
    trained = Trained(tmp_path / "run", ended.out)
    assert engine(trained) == "DeepSpeed ZeRO-2"
    assert "processes: 1 (gloo)" in trained.out
    assert len(trained.column("loss")) == 2
