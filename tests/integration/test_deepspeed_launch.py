"""Start DeepSpeed by its launcher, by torchrun, or without a launcher, with ds_config.json or
another project's file."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest
from conftest import LAUNCH, REPOSITORY, TINY, Trained, run_warm, train

pytestmark = pytest.mark.slow

SCRIPT = "train_pretrain_accelerate.py"
STEPS = "--max_steps 6 --batch_size 2"
SCHEDULE = f"{STEPS} --lr_schedule constant --warmup_steps 3"
FIXTURES = REPOSITORY / "tests" / "fixtures" / "deepspeed"


DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_ssh", "--node_rank", "0"]
DEEPSPEED += ["--master_addr", "127.0.0.1"]
# No machine has GPUs 64 and 65, and the launcher hides all others: the tests run on a CPU.
DEEPSPEED += ["--include", "localhost:64,65"]


@pytest.fixture(scope="module")
def deepspeed(packed, tmp_path_factory):
    """Trains on two processes with DeepSpeed's launcher; `flags` are flags of the script."""
    folder = tmp_path_factory.mktemp("deepspeed")
    (folder / "hostfile").write_text("localhost slots=66\n", encoding="utf-8")

    def deepspeed(name: str, flags: str) -> Trained:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [*DEEPSPEED, "--hostfile", f"{folder}/hostfile", "--master_port", port, SCRIPT]
        return train(command, 2, packed, folder / name, flags)

    return deepspeed


@pytest.fixture(scope="module")
def ddp(deepspeed) -> Trained:
    """A run that DeepSpeed's launcher has started without a file for DeepSpeed."""
    return deepspeed("ddp", f"{SCHEDULE} --dtype float32")


def test_deepspeeds_launcher_without_a_file_starts_ddp_and_names_the_flag(ddp):
    assert ddp.said("engine").startswith("DDP, not DeepSpeed")
    assert "--deepspeed ds_config.json" in ddp.said("engine")


def test_torchrun_and_flags_of_accelerate_launch_give_the_same_losses(packed, tmp_path):
    """The README's Method 2 is such a launch, without Accelerate's YAML."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node", "2", SCRIPT, "--deepspeed", "ds_config.json"]
    accelerate = [*LAUNCH, "--use_deepspeed", "--deepspeed_config_file", "ds_config.json"]
    accelerate += ["--num_processes=2", "--mixed_precision=bf16", SCRIPT]
    one, other = (
        train(launch, 2, packed, tmp_path / name, SCHEDULE)
        for name, launch in (("torchrun", torchrun), ("accelerate", accelerate))
    )
    for fact, said in (("engine", "DeepSpeed ZeRO-2"), ("precision", "bf16")):
        assert one.said(fact) == other.said(fact) == said
    assert one.column("loss") == other.column("loss")


def test_a_zero3_file_of_another_project_gives_the_losses_of_flags(ddp, deepspeed, tmp_path):
    config = json.loads((FIXTURES / "hugging_face_zero3.json").read_text(encoding="utf-8"))
    config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's Adam needs a compiler
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 3}
    config["scheduler"] = {"type": "WarmupLR", "params": params}
    config["bfloat16"] = config.pop("bf16") | {"enabled": False}  # an old guide's name
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    trained = deepspeed("theirs", f"{STEPS} --deepspeed --deepspeed_config {path}")
    assert trained.said("engine") == "DeepSpeed ZeRO-3, all on the CPU"
    assert trained.said("processes") == "2 (gloo)"
    assert "WarmupLR is --lr_schedule constant --warmup_steps 3, and its" in trained.out
    assert trained.column("loss") == pytest.approx(ddp.column("loss"), abs=1e-5)
    assert trained.column("learning_rate") == ddp.column("learning_rate")


def test_the_debuggers_launch_json_trains_one_deepspeed_process(packed, tmp_path):
    """Run the program and the arguments of launch.json in docs/engines.md without a debugger. The
    variables that a platform sets for a single task are no launcher."""
    page = (REPOSITORY / "docs/engines.md").read_text(encoding="utf-8")
    launch = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    (configuration,) = launch["configurations"]
    assert configuration["request"] == "launch"
    program = Path(configuration["program"].replace("${workspaceFolder}", str(REPOSITORY)))
    assert program == REPOSITORY / SCRIPT
    assert configuration["cwd"] == "${workspaceFolder}"
    where = ["--data", str(packed), "--out_dir", str(tmp_path), "--run_name", "run", *TINY]
    command = [sys.executable, str(program), *configuration["args"], *where]
    platform = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "no.such", "MASTER_PORT": "23456"}
    trained = Trained(tmp_path / "run", run_warm(command, **platform).worked())
    assert trained.said("engine") == "DeepSpeed ZeRO-2"
    assert trained.said("processes") == "1 (gloo)"
    assert len(trained.column("loss")) == 2
