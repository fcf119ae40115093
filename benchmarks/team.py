"""The processes of one contender: they build it, then take as many steps as they are told.

Allocator settings, compiled code and peak memory belong to a process, so each contender has its
own. Between two questions its processes use no CPU.
"""

import math
import multiprocessing
import os
import signal
import time
import traceback
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.contenders import ALLOCATOR, ENGINES, Contender, environments
from benchmarks.matmul import synchronize
from benchmarks.work import Work
from training.engine.usage import peak_memory_bytes

LOG_LINES = 15
LOSS_TOLERANCE = 0.5  # nats around ln(vocab_size), where an untrained model starts


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
        return "\n".join(f"    {line}" for line in lines[-LOG_LINES:])

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
    """Return an OurStep or a PeerStep after its first step; each imports its own libraries alone.

    Raises ValueError: it runs on another engine, or does not begin like an untrained model.
    """
    if contender.is_ours:
        from benchmarks.ours import OurStep

        task = OurStep([*work.flags(), *contender.flags()])
    else:
        from benchmarks.peers import PeerStep

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
    if task.device.type == "cuda":
        seconds = [(time.perf_counter() - clock[0]) / number] * number
    if number:
        task.loss()  # looks at the last gradient
    return {"seconds": seconds, "peak_bytes": peak_memory_bytes(task.device)}
