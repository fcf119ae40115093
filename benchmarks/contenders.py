"""Who takes part in `benchmarks.throughput`, and the processes of each.

Allocator settings, compiled code and peak memory belong to a process, so each contender has its
own. They build it, then take as many steps as they are told, and use no CPU in between.
"""

import math
import multiprocessing
import os
import signal
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks import REPOSITORY
from benchmarks.cli import clean_environment
from benchmarks.ours import OurStep, synchronize
from benchmarks.peers import PEERS, PeerStep
from benchmarks.work import Work
from common.errors import UsageError
from training.engine.device import peak_memory_bytes
from training.engine.estimate import FILES

LOSS_TOLERANCE = 0.5  # nats around ln(vocab_size), where an untrained model starts
# How an engine must call itself, because engines are known to be switched off without a word.
ENGINES = {
    "single": "single process",
    "ddp": "DDP",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
}
VARIANTS = {  # of ours: flags of the training script
    "blocks": ["--gradient_checkpointing", "blocks"],
    "selective": ["--gradient_checkpointing", "selective"],
    "muon": ["--optimizer", "muon"],
}
ALLOCATOR = "allocator"  # a peer's variant: it keeps freed memory, as the training script does


@dataclass(frozen=True)
class Contender:
    """One way to do the work."""

    family: str  # "ours" or a key of PEERS
    compiled: bool
    engine: str = "single"  # of ours, a key of ENGINES
    processes: int = 1
    variant: str = ""  # a key of VARIANTS, or ALLOCATOR

    @property
    def name(self) -> str:
        engine = "" if self.engine == "single" else f"-{self.engine}"
        mode = "compiled" if self.compiled else "eager"
        return f"{self.family}{engine}-{mode}" + (f"+{self.variant}" if self.variant else "")

    @property
    def words(self) -> set[str]:
        """Every word of --contenders that means this one."""
        if self.variant in VARIANTS:
            return {self.name, self.variant}
        return {"all", self.name, self.family, "ours" if self.family == "ours" else "peers"}

    def flags(self) -> list[str]:
        """Return what the training script is told besides the work."""
        words = ["--compile", "on" if self.compiled else "off", *VARIANTS.get(self.variant, [])]
        if self.engine in FILES:
            words += ["--deepspeed", str(REPOSITORY / FILES[self.engine])]
        return words


def all_contenders(processes: int, has_gpu: bool) -> list[Contender]:
    """Return all contenders in the order of the table; the first one chosen is the baseline.

    Args:
        processes: of the engines that can have several.
        has_gpu: GPU memory does not come from the C library, so there is no allocator to choose.
    """
    found = []
    for compiled in (True, False):
        found.append(Contender("ours", compiled))
        engines = ["ddp", "zero1", "zero2"] if processes > 1 else ["zero1", "zero2"]
        found += [Contender("ours", compiled, engine, processes) for engine in engines]
        found += [Contender("ours", compiled, variant=variant) for variant in VARIANTS]
    for family in PEERS:
        for compiled in (True, False):
            variants = [""] if has_gpu else ["", ALLOCATOR]
            found += [Contender(family, compiled, variant=variant) for variant in variants]
    return found


def select(contenders: list[Contender], text: str) -> list[Contender]:
    """Return the contenders that one of the words names, a name or a group.

    Raises UsageError: a word that names none; the message lists those that do.
    """
    known = sorted(set().union(*(contender.words for contender in contenders)))
    words = {word.strip() for word in text.split(",")}
    if wrong := words - set(known):
        raise UsageError(f"--contenders: {min(wrong)!r} is none of {', '.join(known)}")
    return [contender for contender in contenders if contender.words & words]


def environments(
    contender: Contender, folder: Path, fresh_compile: bool = False
) -> list[dict[str, str]]:
    """Return the environment variables of each rank's process.

    Args:
        folder: a temporary one of this contender's, for compiled code.
        fresh_compile: compile into that folder, where nothing is found compiled already.
    """
    common = clean_environment()
    # A process that is killed leaves semaphores, which Python's helper would warn of.
    common["PYTHONWARNINGS"] = "ignore:resource_tracker"
    if fresh_compile:
        common["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
        common["TRITON_CACHE_DIR"] = str(folder / "triton")
    if contender.engine == "single":
        return [common]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common |= {
        "WORLD_SIZE": str(contender.processes),
        "LOCAL_WORLD_SIZE": str(contender.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = map(str, range(contender.processes))
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


class TeamError(Exception):
    """A contender cannot go on; its log ends with the reason."""


class Team:
    """One process per rank; all take the same steps at the same time.

    Each leads a session of its own: Ctrl-C in a terminal reaches the parent alone, which then ends
    them with the compilers and helpers that they have started.

    Args:
        folder: where their output goes.
        fresh_compile: see `environments`.
    """

    def __init__(self, contender: Contender, work: Work, folder: Path, fresh_compile: bool):
        self.started = time.monotonic()
        self.log = folder / "rank0.log"
        self._ranks: dict[Connection, multiprocessing.Process] = {}
        context = multiprocessing.get_context("spawn")
        for rank, environment in enumerate(environments(contender, folder, fresh_compile)):
            ours, theirs = context.Pipe()
            log = folder / f"rank{rank}.log"
            process = context.Process(
                target=serve, args=(theirs, contender, work, log), daemon=True
            )
            with patch.dict(os.environ, environment, clear=True):
                process.start()
            theirs.close()
            self._ranks[ours] = process

    def take(self, steps: int) -> list[dict]:
        """Have all ranks take so many steps; return their answers, see `take_steps`.

        Raises TeamError: an error in one of them, or its end. All processes have then been ended.
        """
        answers = {}
        for connection in self._ranks:
            with suppress(BrokenPipeError):  # the end of its process comes out below
                connection.send(steps)
        while unanswered := self._ranks.keys() - answers.keys():
            for connection in wait(unanswered):
                try:
                    answers[connection] = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._ranks[connection].join()
                    code = self._ranks[connection].exitcode
                    answers[connection] = {"error": f"its process ended with exit code {code}"}
                if "error" in answers[connection]:
                    self.close()
                    raise TeamError(answers[connection]["error"])
        return [answers[connection] for connection in self._ranks]

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-15:])

    def close(self) -> None:
        """End all processes, and the helpers in their sessions."""
        for connection, process in self._ranks.items():
            if process.is_alive():
                process.kill()
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.join()
            connection.close()
        self._ranks = {}


def serve(connection: Connection, contender: Contender, work: Work, log: Path) -> None:
    """Build the contender in this process and take steps until the other end closes."""
    os.setsid()
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        task = build(contender, work)
        while True:
            connection.send(take_steps(task, connection.recv()))
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip().splitlines()
        connection.send({"error": f"{type(error).__name__}: {said[0] if said else ''}"[:200]})
    os._exit(0)  # without the shutdown of process groups, which waits for other ranks


def build(contender: Contender, work: Work):
    """Return an OurStep or a PeerStep after its first step.

    Raises ValueError: it runs on another engine, or does not begin like an untrained model.
    """
    if contender.family == "ours":
        task = OurStep([*work.flags(), *contender.flags()])
    else:
        task = PeerStep(contender.family, work, contender.compiled, contender.variant == ALLOCATOR)
    if not task.engine.startswith(ENGINES[contender.engine]):
        raise ValueError(f"runs as {task.engine!r}, not as {ENGINES[contender.engine]}")
    task.step()
    if abs(task.loss() - math.log(work.config.vocab_size)) > LOSS_TOLERANCE:
        pieces = work.config.vocab_size
        raise ValueError(f"the loss starts at {task.loss():.3f}, not near ln({pieces})")
    return task


def take_steps(task, number: int) -> dict:
    """Return the seconds of each step and the process's peak memory in bytes.

    A GPU works on while Python goes ahead, so there each step counts as the mean of all.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()  # all clocks start together
    synchronize(task.device)
    clock = [time.perf_counter()]
    for _ in range(number):
        task.step()
        clock.append(time.perf_counter())
    synchronize(task.device)
    seconds = [after - before for before, after in pairwise(clock)]
    if task.device.type == "cuda" and number:
        seconds = [(time.perf_counter() - clock[0]) / number] * number
    if number:
        task.loss()  # looks at the last gradient
    return {"seconds": seconds, "peak_bytes": peak_memory_bytes(task.device)}
