"""Run engines on the same steps; report loss, time, and measured and estimated memory and traffic.

    python -m benchmarks.engines      # one process per GPU, or 2 on a CPU
    python -m benchmarks.engines --processes 4 --dtype bfloat16 --engines ddp zero2

    python -m benchmarks.engines --limit 20 --processes 4   # simulated machines, 20 MB/s each

Each engine is launched from its file in configs/, on the same text. On a CPU the processes get
their own network namespace if possible (as root on Linux). No other program uses its loopback
device, so the device counts only the bytes that the processes send.

With --limit each process is alone on a simulated machine (needs root, ip and tc). After the steps
without a limit it takes as many steps with it. The expected seconds are those of scripts.plan, for
the seconds without a limit as the time of computing.
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import distributed

from benchmarks import REPOSITORY
from benchmarks.cli import clean_environment, heading, new_parser, say, table
from benchmarks.links import DEVICE, limit_rate, simulated_machines
from benchmarks.ours import OurStep, synchronize
from benchmarks.processes import adopt_orphans, end_all
from benchmarks.work import DATA, Work
from lm.common.errors import UsageError, one_line_errors, stop_in_order
from lm.common.numbers import available_cores
from lm.engine.engine import exit_rank
from lm.engine.hardware import GIB, peak_memory_bytes
from lm.engine.plan import Network, step_time
from lm.engine.strategy import DDP, FILES

PROGRAM = "benchmarks.engines"
ENGINES = [DDP.config, *FILES]
WARMUP = 2  # steps whose time and traffic do not count: in them, engines learn the order of layers
NOTE = (
    "Losses are of rank 0, in the last micro-batch of the first step and of step {}. "
    "Memory is the largest peak of a process; on a CPU, measured and expected memory include "
    "libraries. Bytes are the mean that a process sends per step, counted by the network device. "
    "The last losses differ by at most {:.1e}."
)
# In a new network namespace the loopback device exists, but it is down.
OWN_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        options, work = parse_options(argv)
        adopt_orphans()
        rows = []
        try:
            for name in options.engines:
                rows.append(measure(name, work, options))
        finally:  # after an error or Ctrl-C, print the engines so far
            if rows:
                print(f"{heading(PROGRAM, argv)}\n\n{describe(rows, options.steps)}")


def parse_options(argv: list[str] | None) -> tuple[argparse.Namespace, Work]:
    """Return the flags and the work. Raises UsageError for wrong flags or text."""
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    processes = torch.cuda.device_count() or 2
    default = ENGINES[1:] if processes == 1 else ENGINES  # no DDP of one process
    add("--engines", nargs="+", choices=ENGINES, default=default)
    add("--processes", type=int, default=processes, help="processes of each engine")
    add("--steps", type=int, default=20, help=f"steps; the first {WARMUP} warm up")
    add("--limit", type=float, default=0, help="MB/s that each process can send (0: no limit)")
    shape = {"dim": 512, "n_layers": 8, "n_heads": 8, "batch_size": 4, "accumulation_steps": 2}
    for name, value in (shape | {"max_seq_len": 128}).items():
        add(f"--{name}", type=int, default=value, help="as in training")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--data", default=DATA, help="folder of prepared text")
    options = parser.parse_args(argv)
    given = {name: getattr(options, name) for name in (*shape, "dtype")}
    return options, Work(**given, seq_len=options.max_seq_len).on(options.data)


def counts_traffic() -> bool:
    """Return True if CPU processes can have their own network namespace (as root on Linux)."""
    if torch.cuda.is_available() or not shutil.which("unshare"):
        return False
    return subprocess.run([*OWN_NETWORK, "true"], capture_output=True).returncode == 0


def measure(name: str, work: Work, options: argparse.Namespace) -> dict:
    """Return the results that `take_steps` writes. Raises UsageError if the engine failed."""
    say(f"{name}: {options.steps} steps")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as machines:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(REPOSITORY / "configs" / f"{name}.yaml")]
        command += ["--num_processes", str(options.processes)]
        task = ["-m", PROGRAM, str(out), str(options.steps), str(options.limit)]
        task += [*work.flags(), "--compile", "off"]
        if options.limit:
            inside = machines.enter_context(simulated_machines(options.processes))
            command += ["--num_machines", str(options.processes), "--main_process_port", "29500"]
            command += ["--main_process_ip", inside[0][1]]
            if name != DDP.config:
                command += ["--deepspeed_multinode_launcher", "standard"]
            started = [[*words, *command, "--machine_rank"] for words, _ in inside]
            commands = [[*words, str(rank), *task] for rank, words in enumerate(started)]
        else:
            own = OWN_NETWORK if counts_traffic() else ()
            commands = [[*own, *command, "--main_process_port", "0", *task]]
        machines.callback(end_all)  # runs before the machines are removed
        environ = clean_environment() | {"GLOO_SOCKET_IFNAME": DEVICE if options.limit else "lo"}
        if options.limit:  # a simulated machine does not see that it shares the cores
            environ["OMP_NUM_THREADS"] = str(max(1, available_cores() // options.processes))
        outputs = [Path(folder) / f"{i}.log" for i in range(len(commands))]
        processes = [
            subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environ,
                stdout=machines.enter_context(open(output, "wb")),
                stderr=subprocess.STDOUT,
            )
            for command, output in zip(commands, outputs, strict=True)
        ]
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.1)  # if a machine fails, the others may wait for it without end
        if any(codes) or not out.exists():
            text = "".join(output.read_text("utf-8", "replace") for output in outputs)
            said = [line for line in text.splitlines() if re.search("[Ee]rror: ", line)]
            code = next(filter(None, codes), 0)
            how = f"by signal {-code}" if code < 0 else f"with {code}"
            raise UsageError(": ".join([f"{name} ended {how}", *said[:1]]))
        return json.loads(out.read_text(encoding="utf-8"))


def describe(rows: list[dict], steps: int) -> str:
    """Return the table, and a note that explains its columns."""
    counted = bool(rows[0]["limited"]) or counts_traffic()
    cells = []
    for row in rows:
        sent, sent_expected = row["sent"] / 1e6, row["sent_expected"] / 1e6
        cells.append(
            {
                "engine": row["engine"],
                "first loss": f"{row['losses'][0]:.5f}",
                "last loss": f"{row['losses'][-1]:.5f}",
                "seconds per step": f"{row['seconds']:.3f}",
                **limited(row),
                "memory, GiB": f"{row['peak'] / GIB:.3f}",
                "expected, GiB": compare(row["peak_expected"] / GIB, row["peak"] / GIB, 3),
                "sent, MB": f"{sent:.2f}" if counted else "n/a",
                "expected, MB": compare(sent_expected, sent) if counted else f"{sent_expected:.2f}",
            }
        )
    losses = [row["losses"][-1] for row in rows]
    return f"{table(cells)}\n\n{NOTE.format(steps, max(losses) - min(losses))}"


def limited(row: dict) -> dict[str, str]:
    """Return the cells about the steps with limited links; none without such steps."""
    if not row["limited"]:
        return {}
    measured, expected = row["limited"], row["limited_expected"]
    return {"with the limit": f"{measured:.3f}", "by the plan": compare(expected, measured, 3)}


def compare(expected: float, measured: float, digits: int = 2) -> str:
    """Return the expected value and its relative error."""
    return f"{expected:.{digits}f} ({expected / measured - 1:+.1%})"


def wait_for_all() -> None:
    if distributed.is_initialized():
        distributed.barrier()


def sent_bytes(device: str) -> int:
    """Return the bytes that a device of this network namespace has sent."""
    table = Path("/proc/self/net/dev").read_text("ascii")
    lines = (line.split(":") for line in table.splitlines() if ":" in line)
    return next(int(counts.split()[8]) for name, counts in lines if name.strip() == device)


def take_steps(out: Path, steps: int, limit: float, flags: list[str]) -> None:
    """Train as one rank of an engine. Rank 0 writes to `out`: the engine's name, its losses, the
    median seconds of a step (also with links of `limit` MB/s, if that is not 0), and the measured
    and expected bytes in memory and sent per step."""
    # Load libraries and AdamW before the model, to measure their memory: `expected` includes it.
    import deepspeed.runtime.zero.muon.muon_optimizer
    import deepspeed.runtime.zero.stage3  # noqa: F401

    weight = torch.nn.Parameter(torch.ones(1))
    weight.sum().backward()
    torch.optim.AdamW([weight], fused=True).step()
    libraries = peak_memory_bytes(torch.device("cpu"))
    task = OurStep(flags)
    engine, device = task.run.engine, task.device
    device_name = DEVICE if limit else "lo"
    losses, seconds, limited, sent = [], [], [], 0
    for step in range(1, steps + 1 + (steps if limit else 0)):
        if step == WARMUP + 1:
            wait_for_all()
            sent = sent_bytes(device_name)
            wait_for_all()
        if step == steps + 1:
            wait_for_all()
            limit_rate(1e6 * limit)
            wait_for_all()
        synchronize(device)
        started = time.perf_counter()
        task.step()
        synchronize(device)
        (seconds if step <= steps else limited).append(time.perf_counter() - started)
        losses.append(task.loss())
    wait_for_all()
    sent = torch.tensor(float(sent_bytes(device_name) - sent))
    if limit and distributed.is_initialized():  # each process has a device of its own
        distributed.all_reduce(sent)
    computing = statistics.median(seconds[WARMUP:])
    network = Network(1, math.inf, 1e6 * limit or math.inf)
    expected = step_time(engine.strategy, task.run.work, computing, network)
    on_cpu = device.type == "cpu"
    measured = {
        "engine": engine.name,
        "losses": losses,
        "seconds": computing,
        "limited": statistics.median(limited) if limited else None,
        "limited_expected": expected.seconds,
        "sent": sent.item() / engine.processes / (len(losses) - WARMUP),
        "sent_expected": expected.sent,
        "peak": engine.largest(peak_memory_bytes(device)),
        "peak_expected": task.expected.peak + (engine.largest(libraries) if on_cpu else 0),
    }
    if engine.is_main:
        out.write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        main()
    else:  # a process that `measure` has launched
        try:
            take_steps(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
        finally:
            exit_rank()
