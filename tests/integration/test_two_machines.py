"""Training on two machines, which Linux namespaces simulate. Each machine starts its processes."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import (
    LAUNCH,
    SAFETY_NET_SECONDS,
    TINY,
    Trained,
    clean_environment,
    copy_repository,
    kill_all,
    pack,
    train,
    train_command,
    tree_of,
    wait_for,
    write_corpus,
)
from machines import ADDRESSES, NAMES, two_machines

pytestmark = pytest.mark.slow

SCRIPT = "train_pretrain_accelerate.py"
CUT_SECONDS = 20
# With this schedule the learning rate does not depend on --max_steps.
FLAGS = (
    "--n_layers 1 --dtype float32 --batch_size 2 --lr_schedule constant --warmup_steps 0 "
    "--learning_rate 1e-3 --eval_interval 0 --compile off"
)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with two_machines(tmp_path_factory.mktemp("machines")) as both:
        yield both


def rows_of(run: Path) -> list[dict]:
    """Return the rows of the steps that a run has logged so far."""
    return Trained(run, "").rows() if (run / "metrics.jsonl").exists() else []


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if "error: " in line]


@pytest.fixture
def start(machines, packed, tmp_path):
    """Starts a run on both machines with `accelerate launch`, as docs/engines.md shows."""

    def start(flags: str) -> list[subprocess.Popen]:
        launch = [*LAUNCH[:-2], "--config_file", "configs/multi_node.yaml", "--num_processes", "2"]
        launch += ["--main_process_ip", ADDRESSES[0]]
        processes = []
        for rank, machine in enumerate(machines):
            command = [*launch, "--machine_rank", str(rank), SCRIPT]
            command = train_command(command, 2, packed, tmp_path / "run", f"{FLAGS} {flags}")
            log = tmp_path / f"{machine.name}.log"
            log.unlink(missing_ok=True)
            processes.append(machine.start(command, log))
        return processes

    return start


@pytest.mark.variant  # of the next test, and of the test of a dead rank in test_reliability.py
def test_a_run_outlasts_a_network_cut_and_resumes_after_a_death(machines, start, packed, tmp_path):
    """The losses are those of one machine with the same number of processes."""
    run = tmp_path / "run"
    here, there = start("--max_steps 1000000 --save_interval 5")
    wait_for(lambda: len(rows_of(run)) >= 10, here, there)
    machines[1].plug("down")
    before = len(rows_of(run))
    time.sleep(CUT_SECONDS)
    during = len(rows_of(run))
    machines[1].plug("up")
    wait_for(lambda: len(rows_of(run)) >= during + 10, here, there)
    kill_all(there)
    code = here.wait(SAFETY_NET_SECONDS)
    assert during <= before + 2  # one step in progress, and one that was not logged yet
    assert code == 1  # the exit code of the launcher
    (line,) = errors((tmp_path / f"{NAMES[0]}.log").read_text())
    assert line.startswith(f"{SCRIPT}: error: another process has ended, see its output (")
    assert f"[{ADDRESSES[1]}]" in line
    assert "--resume auto" in line

    steps = len(rows_of(run)) + 5
    codes = [p.wait(SAFETY_NET_SECONDS) for p in start(f"--max_steps {steps} --resume auto")]
    said = (tmp_path / f"{NAMES[0]}.log").read_text()
    assert codes == [0, 0], said
    assert "processes: 2 (gloo)" in said
    assert "engine: DeepSpeed ZeRO-2" in said
    one = train("zero2", 2, packed, tmp_path / "one", f"{FLAGS} --max_steps {steps}")
    assert [row["loss"] for row in rows_of(run)] == one.column("loss")
    assert len(one.column("loss")) == steps
    assert one.ends_as(Trained(run, ""), ("weights",))


def test_a_slurm_job_prepares_data_once_and_saves_if_one_machine_gets_a_signal(machines, tmp_path):
    """The test writes an srun that starts the command on each machine, as SLURM's srun does."""
    (tmp_path / "clone").mkdir()
    clone = copy_repository(tmp_path / "clone")
    text = write_corpus(tmp_path / "sums.jsonl", documents=1000)
    start = ["while [[ $1 == --* ]]; do shift; done"]
    for rank, machine in enumerate(machines):
        task = shlex.join([*machine.inside(clone), "env", f"SLURM_NODEID={rank}"])
        files = f"&>{tmp_path}/said-{rank}; echo $? >{tmp_path}/code-{rank}"
        start.append(f'{{ {task} "$@" {files}; }} &')
    scripts = {"srun": [*start, "wait"], "scontrol": [f"printf '%s\\n' {' '.join(NAMES)}"]}
    for name, lines in scripts.items():
        (tmp_path / name).write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
        (tmp_path / name).chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
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
    wait_for(lambda: len(rows_of(clone / "out" / "runs" / "job-4242")) >= 5, process)
    (script,) = (
        child
        for child in tree_of(process.pid)
        if child.cmdline()[:2] == ["bash", "run_accelerate.sh"]
        and child.environ()["SLURM_NODEID"] == "1"
        and child.parent().name() != "bash"  # no subshell of the script
    )
    script.terminate()
    process.wait(SAFETY_NET_SECONDS)
    codes, said = (
        [(tmp_path / f"{what}-{rank}").read_text() for rank in (0, 1)] for what in ("code", "said")
    )
    assert codes == ["0\n", "0\n"], said
    assert sum("bytes per token" in words for words in said) == 1
    assert sum(": already prepared from this text" in words for words in said) == 1
    assert [path.name for path in (clone / "out" / "data").glob("[!.]*")] == ["sums"]
    for words in said:
        assert "Traceback" not in words
        assert errors(words) == []
    assert "stopped by SIGTERM after step" in said[0]
    command = shlex.split(said[0].partition("to go on:\n")[2].splitlines()[0])
    assert command[:3] == ["NUM_MACHINES=2", "MACHINE_RANK=0", f"MASTER_ADDR={NAMES[0]}"]
    assert "MASTER_PORT=24242" in command
    assert command[-2:] == ["--resume", "out/runs/job-4242"]
    assert not list((clone / "out").glob(".stopped-*"))


@pytest.fixture
def both(machines, tmp_path):
    """Trains on both machines without a launcher; returns the exit codes and the outputs.

    The second machine also gets the flags `on_the_second`.
    """
    ports = iter(range(29600, 29700))

    def both(flags: str, on_the_second: str = "") -> tuple[list[int], list[str]]:
        where = ["--data", str(tmp_path / "data"), "--out_dir", str(tmp_path / "runs")]
        command = [sys.executable, SCRIPT, *TINY, *where, *FLAGS.split(), *flags.split()]
        place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(next(ports))}
        place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        each, logs, processes = zip(machines, ("", on_the_second), strict=True), [], []
        for rank, (machine, more) in enumerate(each):
            logs.append(tmp_path / f"{machine.name}.log")
            logs[-1].unlink(missing_ok=True)
            words = [*command, *more.split()]
            processes.append(machine.start(words, logs[-1], RANK=str(rank), **place))
        codes = [process.wait(SAFETY_NET_SECONDS) for process in processes]
        return codes, [log.read_text(encoding="utf-8") for log in logs]

    return both


@pytest.fixture
def data(packed, tmp_path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "data"))


def the_error_of_both(ended: tuple[list[int], list[str]]) -> str:
    """Return machine 0's error line. Machine 1 must add only "(rank 1)"; both must exit with 2."""
    codes, said = ended
    assert codes == [2, 2], said
    assert not any("Traceback" in words for words in said), said
    ((first,), (second,)) = map(errors, said)
    start = f"{SCRIPT}: error: "
    assert first.startswith(start)
    assert second == first.replace(start, f"{SCRIPT} (rank 1): error: ")
    return first


def test_data_missing_on_one_machine_is_one_error_line_on_both(both, data, machines):
    machines[1].hide(data)
    line = the_error_of_both(both("--max_steps 2"))
    assert f"{data}: no prepared data here" in line
    assert f"(of 2 processes only rank 1 on {NAMES[1]}: " in line


def test_other_data_and_flags_on_one_machine_are_one_error_line_on_both(both, data, tmp_path):
    other = pack(write_corpus(tmp_path / "other.jsonl", documents=200), tmp_path / "other")
    line = the_error_of_both(both("--max_steps 2", f"--data {other} --grad_clip 0.5"))
    assert f"rank 1 on {NAMES[1]} has --grad_clip 0.5 (not 1.0), tokenizer " in line
    assert ", data " in line


def test_a_folder_that_one_machine_lacks_allows_a_run_but_no_resume(both, data, tmp_path, machines):
    (tmp_path / "runs").mkdir()
    machines[1].hide(tmp_path / "runs")
    codes, said = both("--max_steps 2 --run_name run")
    assert codes == [0, 0], said
    assert f"WARNING: not every machine sees {tmp_path}/runs/run, where machine 0" in said[0]
    assert (tmp_path / "runs" / "run" / "weights").is_dir()
    machines[1].do("sh", "-c", f'test -z "$(ls -A {tmp_path}/runs)"')  # nothing was written there
    line = the_error_of_both(both("--max_steps 4 --run_name run --resume auto"))
    assert "step-00000002" in line
    assert f"(of 2 processes only rank 1 on {NAMES[1]}: " in line
