"""The contenders of `benchmarks.throughput`, and the processes in which they run.

Allocator settings, compiled code and peak memory belong to a process. Therefore each contender has
its own process. It builds the model, takes steps on request, and uses no CPU between requests.
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
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

from benchmarks import REPOSITORY
from benchmarks.cli import clean_environment
from benchmarks.ours import OurStep, synchronize
from benchmarks.peers import PEERS, PeerStep
from benchmarks.work import Work
from lm.common.errors import UsageError
from lm.engine.hardware import peak_memory_bytes
from lm.engine.strategy import FILES

LOSS_TOLERANCE = 0.5  # nats around ln(vocab_size), where an untrained model starts
# Start of the name that an engine must report: a wrong setting can switch an engine off silently.
ENGINES = {
    "single": "single process",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
}
VARIANTS = {  # variants of "ours" → (engine, flags of the training script)
    "blocks": ("single", ["--gradient_checkpointing", "blocks"]),
    "selective": ("single", ["--gradient_checkpointing", "selective"]),
    "muon": ("single", ["--optimizer", "muon"]),
    "uncoalesced": ("zero2", ["--no-coalesce_reduction"]),
}
ALLOCATOR = "allocator"  # variant of a peer: it keeps freed memory like the training script


@dataclass(frozen=True)
class Contender:
    """One way to do the work: a project with its engine and settings."""

    family: str  # "ours" or a key of PEERS
    compiled: bool
    engine: str = "single"  # a key of ENGINES; peers have only "single"
    variant: str = ""  # a key of VARIANTS, or ALLOCATOR

    @property
    def name(self) -> str:
        engine = "" if self.engine == "single" else f"-{self.engine}"
        mode = "compiled" if self.compiled else "eager"
        return f"{self.family}{engine}-{mode}" + (f"+{self.variant}" if self.variant else "")

    @property
    def words(self) -> set[str]:
        """The words of --contenders that select this contender."""
        if self.variant in VARIANTS:
            return {self.name, self.variant}
        return {"all", self.name, self.family, "ours" if self.family == "ours" else "peers"}

    def flags(self) -> list[str]:
        """Return the flags of the training script that do not depend on the work."""
        words = ["--compile", "on" if self.compiled else "off"]
        if self.variant in VARIANTS:
            words += VARIANTS[self.variant][1]
        if self.engine in FILES:
            words += ["--deepspeed", str(REPOSITORY / FILES[self.engine])]
        return words


def all_contenders(has_gpu: bool) -> list[Contender]:
    """Return all contenders in the order of the table. The first selected one is the baseline.
    Without a GPU, peers also run with our allocator settings."""
    found = []
    for compiled in (True, False):
        found += [Contender("ours", compiled, engine) for engine in ENGINES]
        for name, (engine, _) in VARIANTS.items():
            found.append(Contender("ours", compiled, engine, name))
    for family in PEERS:
        for compiled in (True, False):
            variants = [""] if has_gpu else ["", ALLOCATOR]
            found += [Contender(family, compiled, variant=variant) for variant in variants]
    return found


def select(contenders: list[Contender], words: list[str]) -> list[Contender]:
    """Return the contenders that are selected by a name or a group in `words`.

    Raises UsageError if a word is unknown; the message lists the known words.
    """
    known = sorted(set().union(*(contender.words for contender in contenders)))
    if wrong := set(words) - set(known):
        raise UsageError(f"--contenders: {min(wrong)!r} is none of {', '.join(known)}")
    return [contender for contender in contenders if contender.words & set(words)]


def environment_of(contender: Contender) -> dict[str, str]:
    """Return the environment variables of its process; DeepSpeed needs those of a launcher."""
    # A killed process leaves semaphores behind, and Python would warn about them.
    common = clean_environment() | {"PYTHONWARNINGS": "ignore:resource_tracker"}
    if contender.engine == "single":
        return common
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    return common | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


class RunnerError(Exception):
    """A contender cannot go on. The message gives the reason."""

    def __init__(self, contender: Contender, reason: str):
        super().__init__(reason)
        self.contender = contender


class Runner:
    """The process of a contender.

    It has its own session, so that Ctrl-C in a terminal reaches only the parent. The parent then
    ends the process, and the compilers and helpers that it has started.

    Args:
        log: the file for its output.
    """

    def __init__(self, contender: Contender, work: Work, log: Path):
        self.started = time.monotonic()
        self.contender, self.log = contender, log
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = theirs, contender, work, log
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        with patch.dict(os.environ, environment_of(contender), clear=True):
            self._process.start()
        theirs.close()

    def ask(self, request: int | Path) -> dict:
        """Let the process take a number of steps, or trace one step into a folder. Return the dict
        of `take_steps`, or the seconds of the traced step and its phases.

        Raises RunnerError, after ending the process, if it failed or has ended.
        """
        with suppress(BrokenPipeError):  # the process may have left an error before it ended
            self._connection.send(request)
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            answer = {"error": f"its process ended with exit code {self._process.exitcode}"}
        if "error" in answer:
            self.close()
            raise RunnerError(self.contender, answer["error"])
        return answer

    def last_lines(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-15:])

    def close(self) -> None:
        """End the process if it still runs, and the helpers in its session."""
        if self._process.is_alive():
            self._process.kill()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._connection.close()


def serve(connection: Connection, contender: Contender, work: Work, log: Path) -> None:
    """Build the contender. Answer requests until one fails or the parent closes the pipe."""
    os.setsid()
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        task = build(contender, work)
        while True:
            request = connection.recv()
            profiled = isinstance(request, Path)
            connection.send(task.profile(request) if profiled else take_steps(task, request))
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip().splitlines()
        connection.send({"error": f"{type(error).__name__}: {said[0] if said else ''}"[:200]})
    os._exit(0)  # skips the shutdown of process groups


def build(contender: Contender, work: Work):
    """Return an OurStep or a PeerStep after its first step.

    Raises ValueError if the engine or the first loss is not as expected.
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
    """Return the seconds of each step, and the process's measured and expected peak of memory.

    A GPU runs asynchronously. There, the time of each step is the mean over all steps.
    """
    synchronize(task.device)
    clock = [time.perf_counter()]
    for _ in range(number):
        task.step()
        clock.append(time.perf_counter())
    synchronize(task.device)
    seconds = [after - before for before, after in pairwise(clock)]
    if task.device.type == "cuda" and number:
        seconds = [(time.perf_counter() - clock[0]) / number] * number
    if not math.isfinite(task.loss()):  # steps may have been skipped
        raise FloatingPointError("the loss is not finite")
    return {
        "seconds": seconds,
        "peak_bytes": peak_memory_bytes(task.device),
        "expected_bytes": task.expected and task.expected.peak,
    }
