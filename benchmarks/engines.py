"""Every engine on the same steps: losses, seconds, memory and traffic beside what is expected.

    python -m benchmarks.engines      # 2 processes on a CPU, all GPUs where there are any
    python -m benchmarks.engines --processes 4 --dtype bfloat16 --engines ddp,zero2

Each engine is launched from its file in configs/, on random tokens, the same for all. On a CPU the
processes have a network namespace of their own, if that is allowed (as root, on Linux): its
loopback device counts what they send, and nobody else uses it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import REPOSITORY
from benchmarks.contenders import LAUNCHER_VARIABLES
from benchmarks.engine_worker import WARMUP
from benchmarks.flags import at_least, names, new_parser
from benchmarks.markdown import heading, table
from benchmarks.work import Work
from common.errors import UsageError, one_line_errors, stop_in_order
from model import ConfigError
from training.engine.kinds import DDP, FILES
from training.engine.memory import GIB

PROGRAM = "benchmarks.engines"
NOTE = (
    "Losses are rank 0's in the last micro-batch of the first and last of {steps} steps, memory "
    "the peak of the process with most{of}. Bytes are sent per process and step{by}."
)
# In a namespace of one's own the loopback device is there, but down.
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        options, work = parse_options(argv)
        rows, failures = [], []
        for name in options.engines:  # one that fails does not take along what others have given
            try:
                rows.append(measure(name, work, options))
            except UsageError as error:
                failures.append(str(error))
        if rows:
            print(heading(PROGRAM, argv) + "\n")
            print(describe(rows, options, on_gpu=torch.cuda.is_available()))
        if failures:
            raise UsageError("; ".join(failures))


def parse_options(argv: list[str] | None) -> tuple[argparse.Namespace, Work]:
    """Raises UsageError, ConfigError: a value that cannot work."""
    known = [DDP.config, *FILES]
    there = [name for name in known if config_file(name).exists()]
    parser = new_parser(PROGRAM, __doc__)
    add, number = parser.add_argument, at_least(1)
    add("--engines", type=names(known), default=there, help=f"of {', '.join(known)}")
    add("--processes", type=at_least(2), default=max(2, torch.cuda.device_count()), help="of each")
    add("--steps", type=at_least(WARMUP + 1), default=20, help=f"{WARMUP} of them to warm up")
    add("--dim", type=number, default=512, help="as in training, like those below")
    add("--n_layers", type=number, default=8)
    add("--n_heads", type=number, default=8)
    add("--max_seq_len", type=number, default=128)
    add("--batch_size", type=number, default=4)
    add("--accumulation_steps", type=number, default=2)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(argv)
    if missing := [name for name in options.engines if name not in there]:
        raise UsageError(f"--engines {missing[0]}: there is no {config_file(missing[0])}")
    same = ("dim", "n_layers", "n_heads", "batch_size", "accumulation_steps", "dtype")
    work = Work(seq_len=options.max_seq_len, **{name: getattr(options, name) for name in same})
    _ = work.config  # refuses a shape that cannot work
    return options, work


def config_file(name: str) -> Path:
    return REPOSITORY / "configs" / f"{name}.yaml"


def namespace_obstacle() -> str | None:
    """Why the processes cannot have a network of their own here; None if they can."""
    try:
        tried = subprocess.run([*ALONE, "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"no program {error.filename}"
    return (tried.stderr.strip() or "unshare failed").splitlines()[-1] if tried.returncode else None


def measure(name: str, work: Work, options: argparse.Namespace) -> dict:
    """What `engine_worker.measure` says of the engine of that name. Raises UsageError: it did not
    come to its end; with the last lines that it printed."""
    print(f"{name}: {options.steps} steps", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launch = [sys.executable, "-m", "accelerate.commands.launch"]
        launch += ["--config_file", str(config_file(name)), "--num_processes"]
        launch += [str(options.processes), "--main_process_port", "0"]
        worker = ["-m", "benchmarks.engine_worker", str(out), json.dumps(asdict(work))]
        command = [*launch, *worker, str(options.steps)]
        if not torch.cuda.is_available() and namespace_obstacle() is None:
            command = [*ALONE, *command]
        ended = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ended.returncode or not out.exists():
            said = [line for line in ended.stdout.splitlines() if re.search("[Ee]rror: ", line)]
            raise UsageError(f"{name} ended with {ended.returncode}: {' '.join(said[:1])}")
        return {"name": name} | json.loads(out.read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    """Without what another launcher has set; gloo on the loopback device."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "TORCHELASTIC")) and name not in LAUNCHER_VARIABLES
    }
    tools = Path(sys.executable).parent  # DeepSpeed looks for ninja on PATH
    kept["PATH"] = f"{tools}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {"GLOO_SOCKET_IFNAME": "lo"}


def describe(rows: list[dict], options: argparse.Namespace, on_gpu: bool) -> str:
    """The table, and what its columns are."""
    obstacle = "a GPU's traffic passes no network device" if on_gpu else namespace_obstacle()
    cells = [
        {
            "engine": row["engine"].partition(",")[0]
            if row["engine"].startswith("DDP")
            else row["engine"],
            "first loss": f"{row['losses'][0]:.5f}",
            "last loss": f"{row['losses'][-1]:.5f}",
            "seconds per step": f"{row['seconds']:.3f}",
            "memory, GiB": f"{row['peak'] / GIB:.3f}",
            "expected, GiB": beside(
                (row["libraries"] + row["peak_expected"]) / GIB, row["peak"] / GIB
            ),
            "without libraries": beside(
                row["peak_expected"] / GIB, (row["peak"] - row["libraries"]) / GIB
            ),
            "sent, MB": "n/a" if obstacle else f"{row['sent'] / 1e6:.2f}",
            "expected, MB": f"{row['sent_expected'] / 1e6:.2f}"
            if obstacle
            else beside(row["sent_expected"] / 1e6, row["sent"] / 1e6, digits=2),
        }
        for row in rows
    ]
    losses = [row["losses"][-1] for row in rows]
    note = NOTE.format(
        steps=options.steps,
        of=""
        if on_gpu
        else ", resident, libraries included; expected is what these had before there "
        "was a model, and the parts of training/engine/memory.py",
        by=f" ({obstacle})" if obstacle else ", counted by the network device",
    )
    spread = f"The last losses lie within {max(losses) - min(losses):.1e} of each other."
    return f"{table(cells)}\n\n{note} {spread}"


def beside(expected: float, measured: float, digits: int = 3) -> str:
    """An expectation, and how far it is from what came."""
    return f"{expected:.{digits}f} ({expected / measured - 1:+.1%})"


if __name__ == "__main__":
    main()
