"""Kills, signals, NaN, missing memory, failed saves, and data that disappears during a run."""

import json
import random
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import psutil
import pytest
import torch
from conftest import (
    REPOSITORY,
    SAFETY_NET_SECONDS,
    Trained,
    clean_environment,
    has_ended,
    injected,
    kill_all,
    launch_command,
    run_warm,
    train,
    train_command,
    tree_of,
    wait_for,
)
from warm_ranks import WarmProcess

from lm.engine.strategy import FILES
from lm.storage.checkpoint import read_state
from model import Transformer
from train_pretrain_accelerate import main

pytestmark = pytest.mark.slow

# By default a run of so many steps is compiled.
ENDLESS = "--max_steps 1000000 --eval_interval 0 --compile off"


def start(command: list[str], log: Path) -> WarmProcess:
    """Start a run and append its output to `log`."""
    with log.open("a") as output:
        return WarmProcess(command, clean_environment(), output)


def ranks(launcher: WarmProcess) -> list[psutil.Process]:
    """Return the training processes, ordered by pid and therefore by rank."""
    ours = [each for each in tree_of(launcher.pid) if each.ppid() == launcher.pid]
    return sorted(ours, key=lambda child: child.pid)


# Function → values of n: the run stands still before the n-th call. The values cover two or three
# saves. A save writes three files of tensors and syncs nine times: five files, their folder and its
# parent, then the file "latest" and its parent. Each second call of rmtree deletes an old folder.
FORWARD = "model.transformer.Transformer.forward"
PLACES = {
    FORWARD: range(5, 13),
    "lm.formats.portable.save_tensors": range(4, 10),
    "lm.common.atomic.sync": range(12, 30),
    "shutil.rmtree": range(2, 10, 2),
}


def test_killed_runs_end_with_the_weights_of_the_uninterrupted_run(packed, tmp_path):
    """The launcher and the ranks get SIGKILL at each of PLACES. Then one rank gets it after a save:
    the other rank stops too, and Accelerate's launcher, which runs torchrun, names the rank."""
    steps = 16 * len(PLACES)
    flags = f"--max_steps {steps} --save_interval 4 --dropout 0.1 --batch_size 4 --log_interval 3"
    flags += " --keep_last 2 --eval_interval 0"
    whole = train("zero2", 2, packed, tmp_path / "whole", flags)
    flags += " --resume auto"

    dice, log = random.Random(0), tmp_path / "log"
    killed = Trained(tmp_path / "killed", "")
    folder = killed.path / "checkpoints"
    for place, counts in PLACES.items():
        stands = tmp_path / f"stands-{place}"
        stand_still = f"open({str(stands)!r}, 'w').close(); time.sleep(86400)"
        when = f"if os.environ['RANK'] == '0' and calls == {dice.choice(counts)}: {stand_still}"
        launch = launch_command("zero2", 2, injected(tmp_path / "train.py", place, when))
        process = start(train_command(launch, 2, packed, killed.path, flags), log)
        wait_for(stands.exists, process)
        kill_all(process)
        if place.endswith("save_tensors"):
            assert list(folder.glob("*.partial"))
    before = set(folder.glob("step-*"))
    process = start(train_command("zero2", 2, packed, killed.path, flags), log)
    wait_for(lambda: set(folder.glob("step-*")) - before, process)
    all_ranks = ranks(process)
    all_ranks[0].kill()
    assert process.wait(SAFETY_NET_SECONDS) != 0
    assert all(map(has_ended, all_ranks))
    assert "rank      : 0 (local_rank: 0)\n  exitcode  : -9" in log.read_text()
    train("zero2", 2, packed, killed.path, flags)
    assert killed.checkpoint() == killed.checkpoint(steps)
    assert killed.ends_as(whole)
    assert whole.repeatable() == killed.repeatable()


def test_a_signal_to_one_rank_saves_on_all_and_says_how_to_resume(packed, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(train_command("zero2", 2, packed, run, ENDLESS), log)
    wait_for(lambda: "step 5/" in log.read_text(), process)
    ranks(process)[1].send_signal(signal.SIGUSR1)
    assert process.wait(SAFETY_NET_SECONDS) == 0
    step = int((run / "checkpoints/latest").read_text().strip()[5:])
    command = f"the same command with --resume {run}"
    assert f"stopped by SIGUSR1 after step {step}, saved; to go on:\n  {command}" in log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes that this happened")
def test_when_the_launcher_is_killed_its_ranks_save_and_end(packed, tmp_path):
    """Not with warm ranks: they are told by a program's first import."""
    log = tmp_path / "log"
    with log.open("w") as output:
        command = train_command("ddp", 2, packed, tmp_path / "run", ENDLESS)
        place = {"cwd": REPOSITORY, "env": clean_environment()}
        launcher = subprocess.Popen(command, **place, stdout=output)
    wait_for(lambda: "step 5/" in log.read_text(), launcher)
    all_ranks = tree_of(launcher.pid)[1:]
    launcher.kill()
    launcher.wait(SAFETY_NET_SECONDS)
    wait_for(lambda: all(map(has_ended, all_ranks)))
    step = int((tmp_path / "run/checkpoints/latest").read_text().strip()[5:])
    said = f"stopped by the end of its launcher after step {step}, saved; to go on:\n"
    assert said in log.read_text()


@pytest.mark.parametrize(("engine", "names"), [("configs/zero3.yaml", [""]), ("ddp", ["a", "b"])])
def test_a_signal_ends_a_validation_and_the_resumed_run_repeats_it(packed, tmp_path, engine, names):
    """One process gets a signal in the validation of step 3 (if two models train together, of the
    first), and another in that of the last step (of the second), each time before the last of four
    batches. The run ends as the one that never stopped, with the same log."""
    flags = "--max_steps 6 --dropout 0.1 --batch_size 2 --accumulation_steps 2"
    flags += " --eval_interval 3 --eval_samples 16 --sample_interval 3 --keep_last 0"
    several = len(names) > 1
    for name in names if several else []:
        (tmp_path / f"{name}.json").write_text("{}")
        flags += f" --model {tmp_path}/{name}.json"
    at = "calls == int(os.environ['STOP_AT']) and os.environ['RANK'] == '1'"
    stop = f"if {at}: os.kill(os.getpid(), signal.SIGTERM)"
    validates = "len(args) > 2 and not args[0].training"
    program = f"train_{'several' if several else 'pretrain'}_accelerate"
    script = injected(tmp_path / "train.py", FORWARD, stop, validates, program)

    def train_until(where: str, stop_at: int, more: str = "--resume auto") -> str:
        launch = launch_command(engine, 2, script)
        words = train_command(launch, 2, packed, tmp_path / where, f"{flags} {more}")
        if several:
            at = words.index("--run_name")
            words[at - 1 : at + 2] = [str(tmp_path / where)]  # the folder of both runs
        return run_warm(words, STOP_AT=str(stop_at)).worked()

    never = 1000
    train_until("whole", never, "")
    assert "stopped by SIGTERM after step 3, saved" in train_until("run", 3, "")
    runs = [Trained(tmp_path / "run" / name, "") for name in names]
    assert not [row for run in runs for row in run.rows("val_loss")]
    assert not list(tmp_path.glob("run/**/samples.jsonl"))
    batches = 4 * (2 * len(names) - 1)  # in whole validations before the one that is interrupted
    assert "stopped by SIGTERM after step 6, saved" in train_until("run", batches + 3)
    assert [row["step"] for row in runs[-1].rows("val_loss")] == [3]
    assert not list(tmp_path.glob("run/**/weights"))
    train_until("run", never)
    for run, name in zip(runs, names, strict=True):
        whole = Trained(tmp_path / "whole" / name, "")
        assert (run.path / "weights").exists()
        assert run.ends_as(whole)
        assert run.repeatable() == whole.repeatable()
        assert run.samples() == whole.samples()
        for step in (3, 6):
            assert read_state(run.checkpoint(step)) == read_state(whole.checkpoint(step))


def test_a_rank_that_runs_out_of_memory_says_so_and_no_rank_waits(packed, tmp_path):
    too_much = "import torch; torch.empty(2**43, dtype=torch.uint8)"
    statements = f"if calls == 4 and os.environ['RANK'] == '1': {too_much}"
    script = injected(tmp_path / "train.py", FORWARD, statements)
    flags = "--max_steps 9 --batch_size 4 --accumulation_steps 2"
    launch = launch_command("zero2", 2, script)
    ended = run_warm(train_command(launch, 2, packed, tmp_path / "run", flags))
    assert ended.code == 1
    assert ended.out.count("Traceback") == 1  # the launcher prints it
    lines = [line for line in ended.out.splitlines() if "error: " in line]
    assert lines[0].startswith(
        "train_pretrain_accelerate.py (rank 1): error: out of memory with --batch_size 4 "
        "--accumulation_steps 2: to use less memory, try a smaller --batch_size"
    )
    # The other rank fails too, unless the launcher ends it first.
    assert all("error: another process has ended" in line for line in lines[1:])


# The programs and DeepSpeed refuse fp16 on a CPU.
ALLOW_FP16 = """
from deepspeed.accelerator import get_accelerator
from lm.engine import engine
get_accelerator().is_fp16_supported = lambda: True
engine.check_precision = lambda *_: None
"""
SUMS = "if calls == 2: print('sums of micro-batches:', args[0].norm.weight.grad_accum.dtype)"
NAN = "args[0].norm.weight.register_hook(lambda x: x * (float('nan') if calls == 20 else 1))"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_a_nan_of_one_rank_never_reaches_the_weights_and_is_counted(
    engine, dtype, packed, tmp_path
):
    """One gradient of one micro-batch of step 3 is NaN on one of two processes. In fp16 it halves
    the scale of the loss, which a resumed run keeps."""
    flags = f"--max_steps 5 --dtype {dtype} --accumulation_steps 8 --batch_size 1"
    flags += " --save_interval 1 --keep_last 0 --eval_interval 0"
    statements = f"if calls == 20 and os.environ['RANK'] == '1': {NAN}"
    if engine == "zero2":
        statements += f"\n{SUMS}"
    config = json.loads((REPOSITORY / FILES[engine]).read_text(encoding="utf-8"))
    config["fp16"] |= {"initial_scale_power": 4, "hysteresis": 1}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    script = injected(tmp_path / "train.py", FORWARD, statements, before=ALLOW_FP16)
    launch = launch_command(tmp_path / "ds.json", 2, script)
    run = train(launch, 2, packed, tmp_path / "run", flags)
    assert ("sums of micro-batches: torch.float32" in run.out) == (engine == "zero2")
    assert "  skipped 1" in run.out
    assert run.column("skipped_steps") == [0, 0, 1, 1, 1]
    assert [loss is None for loss in run.column("loss")] == [False, False, True, False, False]
    weights = [run.tensors(step=step) for step in (2, 3, 4)]
    for name, before in weights[0].items():
        assert before.isfinite().all()
        assert torch.equal(weights[1][name], before)
        assert not torch.equal(weights[2][name], before)
    state = read_state(run.checkpoint())
    assert state["optimizer_step"] == 4
    if dtype == "float16":
        assert state["loss_scale"]["cur_scale"] == 2**4 / 2
        run = train(launch, 2, packed, run.path, f"{flags} --max_steps 6 --resume {run.path}")
        assert read_state(run.checkpoint())["loss_scale"] == state["loss_scale"] | {"cur_iter": 6}


def test_data_that_is_moved_away_does_not_change_a_run(packed, tmp_path, monkeypatch):
    flags = "--max_steps 6 --eval_interval 4 --sample_interval 4 --num_workers 1"
    whole, run = (Trained(tmp_path / name, "") for name in ("whole", "run"))
    main(train_command([], 1, packed, whole.path, flags))
    data = shutil.copytree(packed, tmp_path / "data")
    forward, passes = Transformer.forward, count(1)

    def moving(self, *args, **options):
        if self.training and next(passes) == 3:
            data.rename(tmp_path / "moved")
        return forward(self, *args, **options)

    monkeypatch.setattr(Transformer, "forward", moving)
    main(train_command([], 1, data, run.path, flags))
    assert not data.exists()
    assert [row["step"] for row in run.rows("val_loss")] == [4, 6]
    assert run.repeatable() == whole.repeatable()


def test_a_stop_that_cannot_save_exits_with_code_2(packed, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    flags = f"{ENDLESS} --time_limit 0.02"
    with pytest.raises(SystemExit) as ended:
        main(train_command([], 1, packed, tmp_path / "run", flags))
    assert ended.value.code == 2
    assert "NOT SAVED; nothing has been saved so far" in capsys.readouterr().out
