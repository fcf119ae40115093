"""Two machines, namespaces of this one, and what is started on each of them by itself."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from conftest import (
    SAFETY_NET_SECONDS,
    TINY,
    Trained,
    clean_environment,
    copy_repository,
    train,
    write_corpus,
)
from machines import ADDRESSES, CABLE, NAMES, Machine, kill_all, two_machines

from data.packing import PackingOptions, prepare

pytestmark = pytest.mark.slow

SCRIPT = "train_pretrain_accelerate.py"
CUT_SECONDS = 20
# The schedule must not know where a part of a run ends.
FLAGS = (
    "--n_layers 1 --dtype float32 --batch_size 2 --lr_schedule constant --warmup_steps 0 "
    "--learning_rate 1e-3 --eval_interval 0 --compile off"
)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with two_machines(tmp_path_factory.mktemp("machines")) as both:
        yield both


def wait_for(condition, *processes: subprocess.Popen) -> None:
    """While these run."""
    end = time.monotonic() + SAFETY_NET_SECONDS
    while not condition():
        assert all(process.poll() is None for process in processes), "ended before"
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def rows_of(run: Path) -> list[dict]:
    """What has been logged of its steps so far."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    return [row for line in lines if "loss" in (row := json.loads(line))]


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if "error: " in line]


class Launches:
    """Of one run on both machines by `accelerate launch`, as docs/engines.md has it."""

    def __init__(self, machines: tuple[Machine, Machine], run: Path, data: Path):
        self.machines, self.run, self.data = machines, run, data
        self.logs = [run.parent / f"{machine.name}.log" for machine in machines]

    def start(self, flags: str) -> list[subprocess.Popen]:
        for log in self.logs:
            log.unlink(missing_ok=True)
        launch = [sys.executable, "-m", "accelerate.commands.launch"]
        launch += ["--config_file", "configs/multi_node.yaml", "--num_processes", "2"]
        launch += ["--main_process_ip", ADDRESSES[0]]
        where = ["--data", self.data, "--out_dir", self.run.parent, "--run_name", self.run.name]
        training = [SCRIPT, *TINY, *map(str, where), *FLAGS.split(), *flags.split()]
        return [
            machine.start([*launch, "--machine_rank", str(rank), *training], log)
            for rank, (machine, log) in enumerate(zip(self.machines, self.logs, strict=True))
        ]

    def said(self) -> list[str]:
        return [log.read_text(encoding="utf-8") for log in self.logs]


@dataclass
class Interrupted:
    """What came of a run whose network was cut for a while, and one of whose machines died."""

    steps_before_the_cut: int
    steps_before_the_end_of_it: int
    codes: list[int]
    said: list[str]
    launches: Launches


# The job below joins two machines too, and the loss of one is in test_reliability.py.
CUT = pytest.mark.variant


@pytest.fixture(scope="module")
def interrupted(machines, packed, tmp_path_factory) -> Interrupted:
    run = tmp_path_factory.mktemp("interrupted") / "run"
    launches = Launches(machines, run, packed)
    here, there = launches.start("--max_steps 1000000 --save_interval 5")
    try:
        wait_for(lambda: len(rows_of(run)) >= 10, here, there)
        machines[1].cut()
        before = len(rows_of(run))
        time.sleep(CUT_SECONDS)
        during = len(rows_of(run))
        machines[1].mend()
        wait_for(lambda: len(rows_of(run)) >= during + 10, here, there)
        kill_all(there)
        codes = [here.wait(SAFETY_NET_SECONDS), there.returncode]
    finally:
        for process in (here, there):
            if process.poll() is None:
                kill_all(process)
    return Interrupted(before, during, codes, launches.said(), launches)


@CUT
def test_while_the_network_is_cut_both_wait_and_then_go_on(interrupted):
    """One step may be under way, and one may be about to be written down."""
    assert interrupted.steps_before_the_end_of_it <= interrupted.steps_before_the_cut + 2
    assert len(rows_of(interrupted.launches.run)) >= interrupted.steps_before_the_end_of_it + 10


@CUT
def test_where_one_machine_dies_the_other_ends_and_says_so(interrupted):
    assert interrupted.codes[0] == 1  # the launcher's
    (line,) = errors(interrupted.said[0])
    assert line.startswith(f"{SCRIPT}: error: another process has ended, see what it said (")
    assert f"[{ADDRESSES[1]}]" in line
    assert "--resume auto" in line


@CUT
def test_both_go_on_to_the_losses_of_one_launch_with_as_many_processes(interrupted, packed):
    run = interrupted.launches.run
    steps = len(rows_of(run)) + 5
    processes = interrupted.launches.start(f"--max_steps {steps} --resume auto")
    codes = [process.wait(SAFETY_NET_SECONDS) for process in processes]
    said = interrupted.launches.said()
    assert codes == [0, 0], said
    assert "processes: 2 (gloo)" in said[0]
    assert "engine: DeepSpeed ZeRO-2" in said[0]
    one = train("zero2", 2, packed, run.parent / "one", f"{FLAGS} --max_steps {steps}")
    losses = [row["loss"] for row in rows_of(run)]
    assert len(losses) == steps
    assert losses == one.column("loss")
    for name, tensor in one.tensors().items():
        assert tensor.equal(Trained(run, "").tensors()[name])


@dataclass
class Job:
    """What came of configs/slurm.sh."""

    codes: list[str]
    said: list[str]
    clone: Path


@pytest.fixture(scope="module")
def job(machines, tmp_path_factory) -> Job:
    """A text that nobody has prepared, and a run on it that one machine's script is told to stop.

    SLURM's srun starts a command on each machine: this one's does nothing else.
    """
    clone = copy_repository(tmp_path_factory.mktemp("clone"))
    tools = tmp_path_factory.mktemp("tools")
    text = write_corpus(tools / "sums.jsonl", documents=1000)
    start = ["while [[ $1 == --* ]]; do shift; done"]
    for rank, machine in enumerate(machines):
        task = shlex.join([*machine.inside(clone), "env", f"SLURM_NODEID={rank}"])
        start.append(f'{{ {task} "$@" &>{tools}/said-{rank}; echo $? >{tools}/code-{rank}; }} &')
    scripts = {"srun": [*start, "wait"], "scontrol": [f"printf '%s\\n' {' '.join(NAMES)}"]}
    for name, lines in scripts.items():
        (tools / name).write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
        (tools / name).chmod(0o755)
    environ = {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DATA": str(text),
        **{"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[a-b]", "SLURM_JOB_ID": "4242"},
    }
    flags = [*TINY, *FLAGS.split(), "--max_steps", "1000000", "--sample_interval", "0"]
    process = subprocess.Popen(
        ["bash", "configs/slurm.sh", *flags],
        cwd=clone,
        env=clean_environment() | environ,
        stdin=subprocess.DEVNULL,
    )
    try:
        run = clone / "out" / "runs" / "job-4242"
        wait_for(lambda: len(rows_of(run)) >= 5, process)
        (script,) = (
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if child.cmdline()[:2] == ["bash", "run_accelerate.sh"]
            and child.environ()["SLURM_NODEID"] == "1"
            and child.parent().name() != "bash"
        )
        script.terminate()
        process.wait(SAFETY_NET_SECONDS)
    finally:
        if process.poll() is None:
            kill_all(process)
    codes, said = (
        [(tools / f"{what}-{rank}").read_text() for rank in (0, 1)] for what in ("code", "said")
    )
    return Job(codes, said, clone)


def test_both_prepare_at_once_and_it_is_done_once(job):
    assert sum("bytes per token" in said for said in job.said) == 1
    assert sum(": already prepared from this text" in said for said in job.said) == 1
    assert sorted(path.name for path in (job.clone / "out" / "data").iterdir()) == ["sums"]


def test_a_machine_that_is_127_0_1_1_to_itself_is_found_by_the_other(job):
    for name, said in zip(NAMES, job.said, strict=True):
        assert f"{name} is 127.0.1.1 to itself, where no other machine finds it" in said
        assert f"GLOO_SOCKET_IFNAME={CABLE} instead" in said


def test_a_signal_to_one_machines_script_saves_and_is_a_good_end_of_both(job):
    assert job.codes == ["0\n", "0\n"], job.said
    assert "stopped by SIGTERM after step" in job.said[0]
    command = shlex.split(job.said[0].partition("to go on:\n")[2].splitlines()[0])
    assert command[:3] == ["NUM_MACHINES=2", "MACHINE_RANK=0", f"MASTER_ADDR={NAMES[0]}"]
    assert "MASTER_PORT=24242" in command
    assert command[-2:] == ["--resume", "out/runs/job-4242"]
    for said in job.said:
        assert "Traceback" not in said
        assert errors(said) == []
    assert not list((job.clone / "out").glob(".stopped-*"))


@pytest.fixture
def both(machines, tmp_path):
    """Trains on both, without launchers; returns exit codes and what was said.

    Data is in tmp_path/data, runs are in tmp_path/runs, unless the second machine has other flags.
    """
    ports = iter(range(29600, 29700))

    def both(flags: str, on_the_second: str = "") -> tuple[list[int], list[str]]:
        where = ["--data", str(tmp_path / "data"), "--out_dir", str(tmp_path / "runs")]
        command = [sys.executable, SCRIPT, *TINY, *where, *FLAGS.split(), *flags.split()]
        place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(next(ports))}
        place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        logs = [tmp_path / f"{machine.name}.log" for machine in machines]
        processes = [
            machine.start_warm([*command, *more.split()], log, RANK=str(rank), **place)
            for rank, (machine, log, more) in enumerate(
                zip(machines, logs, ("", on_the_second), strict=True)
            )
        ]
        try:
            codes = [process.wait(SAFETY_NET_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.abandon()
        said = [log.read_text(encoding="utf-8") for log in logs]
        for log in logs:
            log.unlink()
        return codes, said

    return both


@pytest.fixture
def data(packed, tmp_path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "data"))


@pytest.fixture
def hidden(machines):
    """Lets the second machine have an empty disk of its own in place of a folder."""
    folders = []

    def hide(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        machines[1].hide(folder)
        folders.append(folder)

    yield hide
    for folder in folders:
        machines[1].show(folder)


def the_error_of_both(ended: tuple[list[int], list[str]]) -> str:
    """Which each says once, and ends with."""
    codes, said = ended
    assert codes == [2, 2], said
    assert not any("Traceback" in words for words in said), said
    ((first,), (second,)) = map(errors, said)
    start = f"{SCRIPT}: error: "
    assert first.startswith(start)
    assert second == first.replace(start, f"{SCRIPT} (rank 1): error: ")
    return first


def test_data_that_one_machine_does_not_have_is_one_line_on_both(both, data, hidden):
    hidden(data)
    line = the_error_of_both(both("--max_steps 2"))
    assert f"{data}: no prepared data here" in line
    assert f"(only rank 1 on {NAMES[1]} of 2 processes: " in line


def test_other_data_or_flags_on_one_machine_are_one_line_on_both(both, data, tmp_path):
    other = tmp_path / "other"
    options = PackingOptions(400, val_fraction=0.1, workers=1, skip_bad_lines=False)
    text = write_corpus(tmp_path / "other.jsonl", documents=200)
    prepare([str(text)], other, options, progress=lambda n_bytes: None)
    line = the_error_of_both(both("--max_steps 2", f"--data {other} --grad_clip 0.5"))
    assert f"rank 1 on {NAMES[1]} has --grad_clip 0.5 (not 1.0), data " in line


def test_runs_that_one_machine_does_not_see_can_be_made_but_not_resumed(
    both, data, hidden, tmp_path, machines
):
    hidden(tmp_path / "runs")
    codes, said = both("--max_steps 2 --run_name run")
    assert codes == [0, 0], said
    assert f"WARNING: not every machine sees {tmp_path}/runs/run, where the first" in said[0]
    assert (tmp_path / "runs" / "run" / "weights").is_dir()
    machines[1].do("sh", "-c", f'test -z "$(ls -A {tmp_path}/runs)"')  # nothing was written there
    line = the_error_of_both(both("--max_steps 4 --run_name run --resume auto"))
    assert "step-00000002 cannot be used" in line
    assert f"(only rank 1 on {NAMES[1]} of 2 processes: " in line
