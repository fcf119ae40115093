"""Start DeepSpeed by its launcher, by torchrun, or without a launcher, with ds_config.json or
another project's file. The launchers give the same losses as `accelerate launch`."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, TINY, Trained, run, run_warm, train

pytestmark = pytest.mark.slow

SCRIPT = "train_pretrain_accelerate.py"
STEPS = "--max_steps 6 --batch_size 2"
FLAGS = f"{STEPS} --dtype float32 --lr_schedule constant --warmup_steps 3"
FIXTURES = REPOSITORY / "tests" / "fixtures" / "deepspeed"


@pytest.fixture(scope="module")
def accelerate(packed, tmp_path_factory) -> dict[str, Trained]:
    """Maps an engine to its run on two processes, which `accelerate launch` has started."""
    folder = tmp_path_factory.mktemp("accelerate")
    engines = {"ddp": "ddp", "zero2": "zero2", "zero3": "configs/zero3.yaml"}
    return {
        name: train(engine, 2, packed, folder / name, FLAGS) for name, engine in engines.items()
    }


DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_ssh", "--node_rank", "0"]
DEEPSPEED += ["--master_addr", "127.0.0.1"]
# No machine has GPUs 64 and 65, and the launcher hides all others: the tests run on a CPU.
DEEPSPEED += ["--include", "localhost:64,65"]


@pytest.fixture
def deepspeed(tmp_path, packed):
    """Trains on two processes with DeepSpeed's launcher; `flags` are flags of the script."""

    def deepspeed(*flags: str, common: str = FLAGS) -> Trained:
        hostfile = tmp_path / "hostfile"
        hostfile.write_text("localhost slots=66\n", encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [*DEEPSPEED, "--hostfile", str(hostfile), "--master_port", port, SCRIPT, *flags]
        return train(command, 2, packed, tmp_path / "run", common)

    return deepspeed


def test_deepspeeds_launcher_gives_the_losses_of_accelerate_launch(accelerate, deepspeed):
    trained = deepspeed("--deepspeed", "--deepspeed_config", "ds_config.json")
    assert trained.said("engine") == "DeepSpeed ZeRO-2"
    assert re.search(r"processes: 2 \(gloo\)", trained.out)
    assert trained.column("loss") == accelerate["zero2"].column("loss")


def test_deepspeeds_launcher_without_a_file_starts_ddp_and_names_the_flag(accelerate, deepspeed):
    trained = deepspeed()
    assert trained.said("engine").startswith("DDP, not DeepSpeed")
    assert "--deepspeed ds_config.json" in trained.said("engine")
    assert trained.column("loss") == accelerate["ddp"].column("loss")


def test_torchrun_and_deepspeed_give_the_losses_of_accelerate_launch(accelerate, packed, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node", "2", SCRIPT, "--deepspeed", "ds_config.json"]
    trained = train(torchrun, 2, packed, tmp_path / "run", FLAGS)
    assert trained.said("engine") == "DeepSpeed ZeRO-2"
    assert trained.column("loss") == accelerate["zero2"].column("loss")


def test_a_zero3_file_of_another_project_gives_the_losses_of_flags(accelerate, deepspeed, tmp_path):
    config = json.loads((FIXTURES / "hugging_face_zero3.json").read_text(encoding="utf-8"))
    config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's Adam needs a compiler
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 3}
    config["scheduler"] = {"type": "WarmupLR", "params": params}
    config["bfloat16"] = config.pop("bf16") | {"enabled": False}  # an old guide's name
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    trained = deepspeed("--deepspeed", str(path), common=STEPS)
    assert trained.said("engine") == "DeepSpeed ZeRO-3, all on the CPU"
    assert "WarmupLR is --lr_schedule constant --warmup_steps 3, and its" in trained.out
    losses = accelerate["zero3"].column("loss")
    assert trained.column("loss") == pytest.approx(losses, abs=1e-5)
    assert trained.column("learning_rate") == accelerate["zero3"].column("learning_rate")


def test_a_yaml_with_a_stage_and_without_a_file_trains_as_with_flags(accelerate, packed, tmp_path):
    section = {"zero_stage": 2, "offload_optimizer_device": "none", "zero3_init_flag": False}
    config = yaml.safe_load((REPOSITORY / "accelerate_config.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "inline.yaml"
    path.write_text(yaml.safe_dump(config | {"deepspeed_config": section, "mixed_precision": "no"}))
    flags = f"{STEPS} --lr_schedule constant --warmup_steps 3"  # the YAML decides the precision
    trained = train(str(path), 2, packed, tmp_path / "run", flags, start=run)
    assert trained.said("engine") == "DeepSpeed ZeRO-2"
    losses = accelerate["zero2"].column("loss")
    assert trained.column("loss") == pytest.approx(losses, abs=1e-5)


def test_the_debuggers_launch_json_trains_one_deepspeed_process(packed, tmp_path):
    """Run the program and the arguments of launch.json in docs/engines.md without a debugger."""
    page = (REPOSITORY / "docs/engines.md").read_text(encoding="utf-8")
    launch = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    (configuration,) = launch["configurations"]
    assert configuration["request"] == "launch"
    program = Path(configuration["program"].replace("${workspaceFolder}", str(REPOSITORY)))
    assert program == REPOSITORY / SCRIPT
    assert configuration["cwd"] == "${workspaceFolder}"
    where = ["--data", str(packed), "--out_dir", str(tmp_path), "--run_name", "run", *TINY]
    said = run_warm([sys.executable, str(program), *configuration["args"], *where]).worked()
    trained = Trained(tmp_path / "run", said)
    assert trained.said("engine") == "DeepSpeed ZeRO-2"
    assert "processes: 1 (gloo)" in trained.out
    assert len(trained.column("loss")) == 2
