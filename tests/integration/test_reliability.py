"""Kills, signals, NaN, missing memory, failed saves, and data that disappears during a run."""

import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import indent

import psutil
import pytest
import torch
from conftest import (
    REPOSITORY,
    SAFETY_NET_SECONDS,
    Finished,
    Trained,
    clean_environment,
    has_ended,
    kill_all,
    launch_command,
    run_warm,
    start_warm,
    train_command,
    tree_of,
    wait_for,
)
from warm_ranks import WarmProcess

from lm.storage.checkpoint import read_state
from lm.training.interruption import python

pytestmark = pytest.mark.slow

SCRIPT = "train_pretrain_accelerate.py"
ENDLESS = "--max_steps 1000000 --compile off"  # by default such a long run is compiled


class Trainer:
    """Starts runs with the same engine, data and flags in one output folder."""

    def __init__(self, out: Path, packed: Path, engine: str, processes: int, flags: str):
        self.out, self.packed, self.flags = out, packed, f"--eval_interval 0 {flags}"
        self.engine, self.processes = engine, processes

    def command(self, name: str, flags: str = "", script: str = SCRIPT) -> list[str]:
        what = (self.engine, self.processes, self.packed, self.out / name)
        command = train_command(*what, f"{self.flags} {flags}")
        return [script if part == SCRIPT else part for part in command]

    def finish(self, name: str, flags: str = "", script: str = SCRIPT) -> Finished:
        return run_warm(self.command(name, flags, script))

    def start(self, name: str, flags: str = "", script: str = SCRIPT, **environ: str):
        """Start a run. Append its output to the file NAME.log."""
        with open(self.out / f"{name}.log", "a") as log:
            return start_warm(self.command(name, flags, script), log, **environ)

    def said(self, name: str) -> str:
        return (self.out / f"{name}.log").read_text()


def ranks(launcher: WarmProcess) -> list[psutil.Process]:
    """Return the training processes, ordered by pid and therefore by rank."""
    ours = [each for each in tree_of(launcher.pid) if each.ppid() == launcher.pid]
    return sorted(ours, key=lambda child: child.pid)


# Place → owner and name of a function, and values of n: the run stands still before the n-th call.
# The values cover two or three saves. A save writes three files of tensors and syncs nine times:
# five files, their folder and its parent, then the file "latest" and its parent.
PLACES = {
    "forward": ("model.transformer.Transformer", "forward", range(5, 13)),
    "write a file of a checkpoint": ("lm.formats.portable", "save_tensors", range(4, 10)),
    "sync a file to the disk": ("lm.common.atomic", "sync", range(12, 30)),
    "delete an old folder": ("shutil", "rmtree", range(3, 10)),
}
STANDS_STILL = """
import os, sys, time
from pkgutil import resolve_name
sys.path.insert(0, {repository!r})
owner, name, count = os.environ["STAND_STILL"].split()
owner, left = resolve_name(owner), int(count)
original = getattr(owner, name)
def stand_still(*args, **options):
    global left
    left -= 1
    if left == 0:
        open(os.environ["STANDS"], "w").close()
        time.sleep(86400)
    return original(*args, **options)
if os.environ.get("RANK") == "0":
    setattr(owner, name, stand_still)
from train_pretrain_accelerate import main
main()
"""


def test_killed_runs_end_with_the_weights_of_the_uninterrupted_run(packed, tmp_path):
    """The launcher and the ranks get SIGKILL at each of PLACES, and once at a random moment."""
    steps = 16 * len(PLACES)
    flags = f"--max_steps {steps} --save_interval 4 --dropout 0.1 --batch_size 4 --log_interval 3"
    trainer = Trainer(tmp_path, packed, "zero2", 2, flags + " --keep_last 2")
    assert trainer.finish("whole").code == 0
    script = tmp_path / "stands_still.py"
    script.write_text(STANDS_STILL.format(repository=str(REPOSITORY)))

    dice = random.Random(0)
    folder = tmp_path / "killed" / "checkpoints"
    for place, (owner, name, counts) in PLACES.items():
        stands = tmp_path / f"stands-{name}"
        how = {"STAND_STILL": f"{owner} {name} {dice.choice(counts)}", "STANDS": str(stands)}
        process = trainer.start("killed", "--resume auto", str(script), **how)
        wait_for(stands.exists, process)
        kill_all(process)
        if place == "write a file of a checkpoint":
            assert list(folder.glob("*.partial"))
    # Kill once more, at a random moment after a save.
    before = set(folder.glob("step-*"))
    process = trainer.start("killed", "--resume auto")
    wait_for(lambda: set(folder.glob("step-*")) - before, process)
    time.sleep(dice.uniform(0, 0.3))
    kill_all(process)
    assert trainer.finish("killed", "--resume auto").code == 0

    whole, killed = (Trained(tmp_path / name, "") for name in ("whole", "killed"))
    assert killed.checkpoint() == killed.checkpoint(steps)
    assert killed.ends_as(whole)
    assert whole.repeatable() == killed.repeatable()


@pytest.mark.parametrize(
    ("engine", "processes", "name"), [("plain", 1, "SIGINT"), ("zero2", 2, "SIGUSR1")]
)
def test_a_signal_to_one_rank_saves_on_all_and_prints_the_command_that_resumes(
    packed, tmp_path, engine, processes, name
):
    trainer = Trainer(tmp_path, packed, engine, processes, ENDLESS)
    process = trainer.start("run")
    wait_for(lambda: "step 5/" in trainer.said("run"), process)
    rank = ranks(process)[-1] if processes > 1 else process
    rank.send_signal(getattr(signal, name))
    assert process.wait(SAFETY_NET_SECONDS) == 0
    step = int((tmp_path / "run/checkpoints/latest").read_text().strip()[5:])
    said = trainer.said("run")
    assert f"stopped by {name} after step {step}, saved; to go on:\n" in said
    command = shlex.split(said.partition("to go on:\n")[2].splitlines()[0])
    typed = shlex.split("the same command with")
    if processes == 1:
        typed = [python(), *trainer.command("run")[1:]]
    assert command == [*typed, "--resume", str(tmp_path / "run")]


STOPPED_IN_VALIDATION = """
import os, signal, sys
sys.path.insert(0, {repository!r})
import model.transformer as transformer
original, calls = transformer.Transformer.forward, 0
def forward(self, tokens, targets=None, *args, **options):
    global calls
    calls += targets is not None and not self.training
    if calls == int(os.environ["STOP_AT"]) and os.environ.get("RANK", "1") == "1":
        os.kill(os.getpid(), signal.SIGTERM)
        calls += 1
    return original(self, tokens, targets, *args, **options)
transformer.Transformer.forward = forward
from {program} import main
main()
"""


@pytest.mark.parametrize(
    ("engine", "processes", "names"),
    [("plain", 1, [""]), ("configs/zero3.yaml", 2, [""]), ("ddp", 2, ["a", "b"])],
)
def test_a_signal_ends_a_validation_and_the_resumed_run_repeats_it(
    packed, tmp_path, engine, processes, names
):
    """One process gets a signal in the validation of step 3 (if two models train together, of the
    first), and another in that of the last step (of the second), each time before the last of four
    batches. The run ends as the one that never stopped, with the same log."""
    flags = f"--max_steps 6 --dropout 0.1 --batch_size {4 // processes} --accumulation_steps 2"
    flags += " --eval_interval 3 --eval_samples 16 --sample_interval 3 --keep_last 0"
    program = "train_pretrain_accelerate"
    if len(names) > 1:
        program = "train_several_accelerate"
        for name in names:
            (tmp_path / f"{name}.json").write_text("{}")
            flags += f" --model {tmp_path}/{name}.json"
    script = tmp_path / "train_stopped.py"
    script.write_text(STOPPED_IN_VALIDATION.format(repository=str(REPOSITORY), program=program))
    launch = [*launch_command(engine, processes)[:-1], str(script)]

    def train_until(where: str, stop_at: int, more: str = "--resume auto") -> str:
        words = train_command(launch, processes, packed, tmp_path / where, f"{flags} {more}")
        if len(names) > 1:
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


def test_when_a_rank_dies_the_others_stop_and_the_launcher_names_it(packed, tmp_path):
    """Accelerate's launcher runs torchrun, which prints the rank and its exit code."""
    trainer = Trainer(tmp_path, packed, "zero2", 2, ENDLESS)
    process = trainer.start("run")
    wait_for(lambda: "step 5/" in trainer.said("run"), process)
    all_ranks = ranks(process)
    all_ranks[0].kill()
    assert process.wait(SAFETY_NET_SECONDS) != 0
    assert all(map(has_ended, all_ranks))
    said = trainer.said("run")
    assert "rank      : 0 (local_rank: 0)\n  exitcode  : -9" in said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes that this happened")
def test_when_the_launcher_is_killed_its_ranks_save_and_end(packed, tmp_path):
    """Not with warm ranks: they are told by a program's first import."""
    trainer = Trainer(tmp_path, packed, "ddp", 2, ENDLESS)
    log = tmp_path / "run.log"
    with open(log, "w") as output:
        command, environ = trainer.command("run"), clean_environment()
        launcher = subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdout=output)
    wait_for(lambda: "step 5/" in trainer.said("run"), launcher)
    all_ranks = tree_of(launcher.pid)[1:]
    launcher.kill()
    launcher.wait(SAFETY_NET_SECONDS)
    wait_for(lambda: all(map(has_ended, all_ranks)))
    step = int((tmp_path / "run/checkpoints/latest").read_text().strip()[5:])
    said = f"stopped by the end of its launcher after step {step}, saved; to go on:\n"
    assert said in trainer.said("run")


def injected(tmp_path: Path, statements: str) -> str:
    """Write a script that trains, and executes statements after each forward pass of training.

    The statements can use `self` (the model), `out` (its output) and `calls` (passes so far).
    """
    script = tmp_path / "train_injected.py"
    script.write_text(
        f"""
import os, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
import model.transformer as transformer
original, calls = transformer.Transformer.forward, 0
def forward(self, *args, **options):
    global calls
    out = original(self, *args, **options)
    if self.training:
        calls += 1
{indent(statements, " " * 8)}
    return out
transformer.Transformer.forward = forward
from train_pretrain_accelerate import main
main()
"""
    )
    return str(script)


def test_a_rank_that_runs_out_of_memory_says_so_and_no_rank_waits(packed, tmp_path):
    trainer = Trainer(
        tmp_path, packed, "zero2", 2, "--max_steps 9 --batch_size 4 --accumulation_steps 2"
    )
    too_much = "import torch; torch.empty(2**43, dtype=torch.uint8)"
    script = injected(tmp_path, f"if calls == 4 and os.environ['RANK'] == '1': {too_much}")
    ended = trainer.finish("run", script=script)
    assert ended.code == 1
    assert ended.out.count("Traceback") == 1  # the launcher prints it
    lines = [line for line in ended.out.splitlines() if "error: " in line]
    assert lines[0].startswith(
        f"{SCRIPT} (rank 1): error: out of memory with --batch_size 4 --accumulation_steps 2: "
        "to use less memory, try a smaller --batch_size"
    )
    # The other rank fails too, unless the launcher ends it first.
    assert all("error: another process has ended" in line for line in lines[1:])


SUMS = "if calls == 2: print('sums of micro-batches:', self.norm.weight.grad_accum.dtype)"
NAN = "self.norm.weight.register_hook(lambda x: x * (float('nan') if calls == 20 else 1))"


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_a_nan_of_one_rank_never_reaches_the_weights_and_is_counted(engine, packed, tmp_path):
    """In bf16, one gradient of one micro-batch of step 3 is NaN on one of two processes."""
    flags = "--max_steps 5 --dtype bfloat16 --accumulation_steps 8 --batch_size 1"
    flags += " --save_interval 1 --keep_last 0"
    trainer = Trainer(tmp_path, packed, f"configs/{engine}.yaml", 2, flags)
    statements = f"if calls == 20 and os.environ['RANK'] == '1': {NAN}"
    if engine == "zero2":
        statements += f"\n{SUMS}"
    ended = trainer.finish("run", script=injected(tmp_path, statements))
    assert ended.code == 0, ended.out[-3000:]
    assert ("sums of micro-batches: torch.float32" in ended.out) == (engine == "zero2")
    assert "  skipped 1" in ended.out
    run = Trained(tmp_path / "run", "")
    assert run.column("skipped_steps") == [0, 0, 1, 1, 1]
    assert [loss is None for loss in run.column("loss")] == [False, False, True, False, False]
    weights = [run.tensors(step=step) for step in (2, 3, 4)]
    for name, before in weights[0].items():
        assert before.isfinite().all()
        assert torch.equal(weights[1][name], before)
        assert not torch.equal(weights[2][name], before)
    assert json.loads((run.checkpoint() / "state.json").read_text())["optimizer_step"] == 4


def test_fp16_loss_scaling_skips_a_step_with_one_bad_gradient_of_one_process():
    """DeepSpeed trains with ZeRO-1, 2 and 3 and the changes of `launch_fewer_kernels`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["--nproc_per_node", "2", "-m", "tests.integration.bad_gradient"]
    out = run_warm([*launcher, *program]).worked()
    (line,) = [line for line in out.splitlines() if line.startswith("results: ")]
    expected = {
        "changed": [True, False, True, True],
        "finite": [True, False, True, True],
        "skipped": [0, 1, 1, 1],
        "scale": [16, 8, 8, 8],
    }
    assert json.loads(line.removeprefix("results: ")) == [dict.fromkeys("123", expected)] * 2


def test_data_that_is_moved_away_does_not_change_a_run(packed, tmp_path):
    flags = "--max_steps 6 --eval_interval 4 --sample_interval 4 --num_workers 1"
    whole = Trainer(tmp_path, packed, "plain", 1, flags)
    assert whole.finish("whole").code == 0
    data = shutil.copytree(packed, tmp_path / "data")
    script = injected(tmp_path, f"if calls == 3: os.rename({str(data)!r}, {f'{data}-moved'!r})")
    ended = Trainer(tmp_path, data, "plain", 1, flags).finish("run", script=script)
    assert ended.code == 0, ended.out
    assert not data.exists()
    moved, whole = (Trained(tmp_path / name, "") for name in ("run", "whole"))
    assert [row["step"] for row in moved.rows("val_loss")] == [4, 6]
    assert moved.repeatable() == whole.repeatable()


def test_a_stop_that_cannot_save_exits_with_code_1(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "plain", 1, ENDLESS + " --time_limit 0.02")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    ended = trainer.finish("run")
    assert ended.code == 1
    assert "NOT SAVED; nothing has been saved so far" in ended.out
