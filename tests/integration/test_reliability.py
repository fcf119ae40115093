"""A run survives what happens to runs: kills, signals, bad numbers, full disks, damaged files."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY, TINY, Finished, clean_environment, launch_command, run
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


class Trainer:
    """Starts runs of one setting in one output folder."""

    def __init__(self, out: Path, packed: Path, engine: str, processes: int, flags: str):
        self.out, self.engine, self.processes = out, engine, processes
        self.logs = out
        common = ["--data", str(packed), "--out_dir", str(out), "--eval_interval", "0"]
        self.flags = [*TINY, *common, *flags.split()]

    def command(self, name: str, flags: str = "") -> list[str]:
        launch = launch_command(self.engine, self.processes)
        return [*launch, *self.flags, "--run_name", name, *flags.split()]

    def finish(self, name: str, flags: str = "") -> Finished:
        return run(self.command(name, flags))

    def start(self, name: str, flags: str = "", command: list[str] | None = None):
        """A process whose words go to NAME.log."""
        with open(self.logs / f"{name}.log", "a") as log:
            return subprocess.Popen(
                command or self.command(name, flags),
                cwd=REPOSITORY,
                env=clean_environment(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def said(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()

    def checkpoint(self, name: str, step: int) -> Path:
        return self.out / name / "checkpoints" / f"step-{step:08d}"

    def rows(self, name: str) -> list[dict]:
        """metrics.jsonl without what the clock decides."""
        timed = ("tokens_per_second", "step_seconds", "memory_gib", "mfu")
        lines = (self.out / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(x).items() if k not in timed} for x in lines]


def ranks(process: subprocess.Popen) -> list[psutil.Process]:
    """The training processes under a launcher."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "RANK" in child.environ()]


def kill_everything(process: subprocess.Popen) -> None:
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in tree:
        if member.is_running():
            member.kill()
    process.wait()
    psutil.wait_procs(tree[1:])


def wait_for(
    condition, process: subprocess.Popen, seconds: float = 90, pause: float = 0.05
) -> bool:
    """True once the condition holds, False if the process ended before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        if process.poll() is not None:
            return False
        time.sleep(pause)
    raise AssertionError(f"waited {seconds} seconds in vain")


def same_bytes(one: Path, other: Path) -> bool:
    files = ("weights.safetensors", "optimizer.safetensors")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in files)


def test_killed_runs_end_with_the_weights_of_the_uninterrupted_run(packed, tmp_path, thorough):
    """SIGKILL to launcher and ranks, every other time in the middle of a save."""
    kills = 20 if thorough else 4
    steps = 40 * kills
    flags = f"--max_steps {steps} --save_interval 4 --dropout 0.1 --batch_size 4 --log_interval 3"
    trainer = Trainer(tmp_path, packed, "zero2", 2, flags)
    assert trainer.finish("whole").code == 0

    dice = random.Random(0)
    folder = tmp_path / "killed" / "checkpoints"
    in_a_save = 0
    for attempt in range(kills):
        before = {path.name for path in folder.glob("step-*")}

        def saved(count, suffix="", before=before) -> bool:
            new = {path.name for path in folder.glob("step-*")} - before
            return len(new) >= count and any(name.endswith(suffix) for name in new)

        process = trainer.start("killed", "--resume auto")
        if attempt % 2 == 0:
            saves = dice.randint(1, 3)
            alive = wait_for(lambda n=saves: saved(n, ".partial"), process, pause=0)
        else:
            alive = wait_for(lambda: saved(1), process, pause=0.001)
            time.sleep(dice.uniform(0, 0.3))
        assert alive, trainer.said("killed")[-3000:]
        kill_everything(process)
        in_a_save += bool(list(folder.glob("*.partial")))
    assert in_a_save >= kills // 2 - 1  # a save may just have ended between look and kill
    assert trainer.finish("killed", "--resume auto").code == 0

    assert same_bytes(trainer.checkpoint("whole", steps), trainer.checkpoint("killed", steps))
    assert trainer.rows("whole") == trainer.rows("killed")


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "plain", 1, "--max_steps 6 --save_interval 2")
    assert trainer.finish("run").code == 0
    shutil.rmtree(tmp_path / "run" / "weights")
    newest, copy = trainer.checkpoint("run", 6), tmp_path / "copy"
    shutil.copytree(newest, copy)
    contents = bytearray((newest / "weights.safetensors").read_bytes())
    contents[len(contents) // 2] ^= 1
    (newest / "weights.safetensors").write_bytes(contents)

    named = trainer.finish("run", f"--resume {newest}")
    assert named.code == 2
    assert "the checksum of weights.safetensors is wrong" in named.out
    assert f"the newest sound one is {trainer.checkpoint('run', 4)}" in named.out

    auto = trainer.finish("run", "--resume auto")
    assert auto.code == 0
    assert f"DAMAGED CHECKPOINT {newest}" in auto.out
    assert same_bytes(newest, copy)


CHAINS = {
    "1 to 2": [("zero2", 1), ("zero2", 2)],
    "2 to 1": [("zero2", 2), ("zero2", 1)],
    "ZeRO-2 to DDP": [("zero2", 2), ("ddp", 2)],
    "DDP to ZeRO-1 to none": [("ddp", 2), ("zero1", 2), ("plain", 1)],
    "2 to 4 to 2": [("zero2", 2), ("zero2", 4), ("zero2", 2)],
}


VARIANTS = {"1 to 2", "2 to 1", "ZeRO-2 to DDP"}  # test_equivalence has the like of them
CHAIN_NAMES = [
    pytest.param(name, marks=[pytest.mark.variant] if name in VARIANTS else []) for name in CHAINS
]


@pytest.mark.parametrize("name", CHAIN_NAMES)
def test_another_engine_or_process_count_goes_on_with_the_same_losses(packed, tmp_path, name):
    total = 3 * len(CHAINS[name])
    flags = "--dtype float32 --batch_size 2 --save_interval 0"
    # The schedule must not know where a part of the chain ends.
    flags += " --lr_schedule constant --warmup_steps 0 --learning_rate 1e-3"
    straight = Trainer(tmp_path, packed, "plain", 1, f"{flags} --accumulation_steps 4")
    assert straight.finish("straight", f"--max_steps {total}").code == 0
    # The first part chooses the accumulation, the others have to adjust it.
    flags += f" --accumulation_steps {4 // CHAINS[name][0][1]}"
    for i, (engine, processes) in enumerate(CHAINS[name], 1):
        part = Trainer(tmp_path, packed, engine, processes, flags)
        ended = part.finish("chain", f"--max_steps {3 * i} --resume auto")
        assert ended.code == 0, ended.out[-3000:]
    losses = [row["loss"] for row in straight.rows("straight") if "loss" in row]
    chained = [row["loss"] for row in straight.rows("chain") if "loss" in row]
    assert chained == pytest.approx(losses, abs=1e-4)


def test_a_global_batch_that_cannot_be_kept_is_refused(packed, tmp_path):
    one = Trainer(tmp_path, packed, "plain", 1, "--max_steps 2 --batch_size 5")
    assert one.finish("run").code == 0
    two = Trainer(tmp_path, packed, "ddp", 2, "--max_steps 4 --batch_size 2")
    assert "global batch of 5 sequences cannot be made" in two.finish("run", "--resume auto").out


@pytest.mark.parametrize(("engine", "processes"), [("plain", 1), ("zero2", 2)])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_to_one_rank_saves_on_all_and_exits_with_the_command_that_resumes(
    packed, tmp_path, engine, processes, name
):
    trainer = Trainer(tmp_path, packed, engine, processes, "--max_steps 100000")
    process = trainer.start("run")
    assert wait_for(lambda: "step 20/" in trainer.said("run"), process)
    told = ranks(process)[-1] if processes > 1 else process
    told.send_signal(getattr(signal, name))
    assert process.wait(60) == 0
    step = int((tmp_path / "run/checkpoints/latest").read_text().strip()[5:])
    assert f"stopped by {name} after step {step}, saved" in trainer.said("run")
    assert f"--resume {tmp_path / 'run'}" in trainer.said("run")


def test_the_time_limit_saves_and_stops_all_ranks(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "zero2", 2, "--max_steps 100000 --time_limit 0.03")
    ended = trainer.finish("run")
    assert ended.code == 0
    assert "stopped by the time limit after step" in ended.out
    assert (tmp_path / "run/checkpoints/latest").exists()


def test_when_a_rank_dies_the_others_stop_and_it_is_named(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "zero2", 2, "--max_steps 100000")
    process = trainer.start("run")
    assert wait_for(lambda: "step 20/" in trainer.said("run"), process)
    victim = ranks(process)[0]
    rank = victim.environ()["RANK"]
    victim.kill()
    assert process.wait(60) != 0
    said = trainer.said("run")
    assert f"rank      : {rank} (local_rank: {rank})\n  exitcode  : -9" in said


def injected(tmp_path: Path, statement: str, condition: str = "True") -> str:
    """A script that trains, but follows each training forward by a statement.

    In statement and condition, `calls` counts the forwards from 1 and `out` is what one returned.
    """
    script = tmp_path / "train_injected.py"
    script.write_text(
        f"""
import sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
import model.transformer as transformer
original, calls = transformer.Transformer.forward, 0
def forward(self, *args, **options):
    global calls
    out = original(self, *args, **options)
    if self.training:
        calls += 1
        if {condition}:
            {statement}
    return out
transformer.Transformer.forward = forward
from train_pretrain_accelerate import main
main()
"""
    )
    return str(script)


NAN = 'out = out._replace(loss=out.loss * float("nan"))'


def with_script(command: list[str], script: str) -> list[str]:
    return [script if part == "train_pretrain_accelerate.py" else part for part in command]


def test_a_second_signal_exits_at_once(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "plain", 1, "--max_steps 1000")
    script = injected(tmp_path, "print('asleep', flush=True); time.sleep(60)")
    process = trainer.start("run", command=with_script(trainer.command("run"), script))
    assert wait_for(lambda: "asleep" in trainer.said("run"), process)
    process.send_signal(signal.SIGTERM)
    time.sleep(2.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("engine", "dtype"), [("plain", "float32"), ("zero2", "bfloat16"), ("zero1", "bfloat16")]
)
def test_a_nan_never_reaches_the_weights_and_is_counted(packed, tmp_path, engine, dtype):
    flags = f"--max_steps 6 --log_interval 2 --dtype {dtype}"
    trainer = Trainer(tmp_path, packed, engine, 1, flags)
    script = injected(tmp_path, NAN, "calls == 3")
    ended = run(with_script(trainer.command("run"), script))
    assert ended.code == 0, ended.out[-3000:]
    assert "step 3/6  SKIPPED" in ended.out
    rows = [row for row in trainer.rows("run") if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1]
    assert all(row["loss"] > 0 for row in rows)
    checkpoint = trainer.checkpoint("run", 6)
    weights = load_file(checkpoint / "weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert json.loads((checkpoint / "state.json").read_text())["optimizer_step"] == 5


def test_nothing_but_nans_stops_the_run_and_names_the_samples(packed, tmp_path):
    flags = "--max_steps 100 --save_interval 2 --max_bad_steps 3 --batch_size 2"
    trainer = Trainer(tmp_path, packed, "plain", 1, flags)
    script = injected(tmp_path, NAN, "calls > 2")
    ended = run(with_script(trainer.command("run"), script))
    assert ended.code == 2
    assert "3 steps in a row had a non-finite gradient" in ended.out
    assert "the batch of step 5 was samples " in ended.out
    listed = json.loads((tmp_path / "run" / "bad_samples.json").read_text())
    assert (listed["step"], len(listed["samples"])) == (5, 2)
    again = trainer.finish("run", "--resume auto --max_steps 6")
    assert again.code == 0
    assert "DAMAGED" not in again.out


def test_a_disk_that_refuses_does_not_stop_training_and_is_tried_again(packed, tmp_path):
    """A file where a folder should be refuses; its removal makes room again."""
    trainer = Trainer(tmp_path, packed, "plain", 1, "--max_steps 600 --save_interval 10")
    obstacle = tmp_path / "run" / "checkpoints"
    obstacle.parent.mkdir()
    obstacle.write_text("in the way")
    process = trainer.start("run")
    assert wait_for(lambda: "CHECKPOINT NOT SAVED" in trainer.said("run"), process, pause=0.005)
    obstacle.unlink()
    assert process.wait(120) == 0
    assert "saved" in trainer.said("run").rpartition("CHECKPOINT NOT SAVED")[2]
    assert trainer.checkpoint("run", 600).is_dir()


def test_a_disk_that_fills_up_and_has_room_again_costs_nothing_but_checkpoints(
    packed, small_disk, tmp_path
):
    disk = small_disk("8m")
    trainer = Trainer(disk, packed, "plain", 1, "--max_steps 3000 --save_interval 50 --keep_last 1")
    trainer.logs = tmp_path
    process = trainer.start("run")
    assert wait_for(lambda: "step 60/" in trainer.said("run"), process, pause=0.01)
    ballast = disk / "ballast"
    fill = ["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"]
    assert "No space left" in subprocess.run(fill, capture_output=True, text=True).stderr
    time.sleep(2)
    assert process.poll() is None
    ballast.unlink()
    assert process.wait(120) == 0
    assert trainer.checkpoint("run", 3000).is_dir()
    assert [row["step"] for row in trainer.rows("run") if "loss" in row] == list(range(1, 3001))


def test_usr1_to_everything_leaves_a_launcher_that_ignores_it_and_a_saved_run(packed, tmp_path):
    """As a scheduler signals a job; docs/reliability.md has the trap."""
    trainer = Trainer(tmp_path, packed, "zero2", 2, "--max_steps 100000")
    ignoring = ["bash", "-c", """trap '' USR1; exec "$@" """, "ignoring"]
    process = trainer.start("run", command=[*ignoring, *trainer.command("run")])
    assert wait_for(lambda: "step 20/" in trainer.said("run"), process)
    for member in [psutil.Process(process.pid), *ranks(process)]:
        member.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0
    assert "stopped by SIGUSR1" in trainer.said("run")


def test_a_stop_that_could_not_save_is_no_good_end(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "plain", 1, "--max_steps 100000 --time_limit 0.02")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    ended = trainer.finish("run")
    assert ended.code == 1
    assert "NOT SAVED; nothing has been saved so far" in ended.out


def test_a_run_that_is_extended_and_dies_at_its_end_is_not_taken_for_finished(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "plain", 1, "--save_interval 2")
    assert trainer.finish("run", "--max_steps 2").code == 0
    assert trainer.finish("run", "--max_steps 4 --resume auto").code == 0
    assert (tmp_path / "run" / "weights-step-00000002").is_dir()
    shutil.rmtree(tmp_path / "run" / "weights")  # as if killed before they were written
    again = trainer.finish("run", "--max_steps 4 --resume auto")
    assert again.code == 0
    weights = load_file(tmp_path / "run" / "weights" / "model.safetensors")
    saved = load_file(trainer.checkpoint("run", 4) / "weights.safetensors")
    assert all((weights[name] == saved[name]).all() for name in saved)


def test_a_limit_like_a_full_disk_keeps_the_checkpoint_before(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "plain", 1, "--save_interval 2")
    assert trainer.finish("run", "--max_steps 2").code == 0
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "limited"]  # 100 KiB per file
    ended = run([*limited, *trainer.command("run", "--max_steps 4 --resume auto")])
    assert ended.code != 0
    assert "CHECKPOINT NOT SAVED" in ended.out
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step-00000002"
    assert not list((tmp_path / "run/checkpoints").glob("*.partial"))


def test_a_second_run_in_a_live_runs_folder_is_refused_and_a_dead_one_forgotten(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "plain", 1, "--max_steps 100000 --save_interval 5")
    process = trainer.start("run")
    assert wait_for(lambda: "saved" in trainer.said("run"), process)
    second = trainer.finish("run", "--resume auto")
    assert second.code == 2
    assert f"is in use by process {process.pid} on {os.uname().nodename}" in second.out
    kill_everything(process)
    assert trainer.finish("run", "--resume auto --time_limit 0.01").code == 0


def test_resuming_with_another_model_or_batch_lists_the_differences(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "plain", 1, "--max_steps 2")
    assert trainer.finish("run").code == 0
    ended = trainer.finish("run", "--resume auto --max_steps 4 --n_layers 3 --batch_size 3")
    assert ended.code == 2
    assert "n_layers: 2 in the checkpoint, 3 now" in ended.out
    assert "global_batch: 8 in the checkpoint, 3 now" in ended.out


def test_a_finished_run_says_so(packed, tmp_path):
    trainer = Trainer(tmp_path, packed, "plain", 1, "--max_steps 2")
    assert trainer.finish("run").code == 0
    ended = trainer.finish("run", "--resume auto")
    assert ended.code == 0
    assert "is finished: 2 of 2 steps" in ended.out


def test_old_checkpoints_go_but_the_best_stays(packed, tmp_path):
    flags = "--max_steps 10 --save_interval 1 --eval_interval 3 --keep_last 2 --learning_rate 0.1"
    trainer = Trainer(tmp_path, packed, "plain", 1, flags + " --lr_schedule constant")
    assert trainer.finish("run").code == 0
    kept = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    losses = {row["step"]: row["val_loss"] for row in trainer.rows("run") if "val_loss" in row}
    best = trainer.checkpoint("run", min(losses, key=losses.get))
    assert kept == sorted({best, trainer.checkpoint("run", 9), trainer.checkpoint("run", 10)})
