"""One process of one contender: builds it, then takes as many steps as it is told.

    python -m benchmarks.worker FD

Allocator settings, compiled code and peak memory belong to a process, so each contender has its
own. FD is an end of a pipe between two of Python's `Connection`s. In comes (Contender, Work),
answered after the first step, and then numbers of steps to take, each answered with what
`take_steps` measured; in between no CPU is used. A Path asks for `trace_step` into it. An error is
answered by {"error": one line} and ends the process, with the traceback on stderr; so does the
other end of the pipe, when it closes.
"""

import math
import os
import sys
import time
import traceback
from contextlib import nullcontext
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.contenders import Contender
from benchmarks.matmul import synchronize
from benchmarks.work import VOCAB_SIZE, Work
from training.engine.memory import peak_memory_bytes

LOSS_TOLERANCE = 0.5  # nats around ln(VOCAB_SIZE), where an untrained model starts


def serve(connection: Connection) -> int:
    """Answer whatever comes; returns the exit code."""
    try:
        contender, work = connection.recv()
        task = build(contender, work)
        connection.send(take_first_step(task))
        while True:
            asked = connection.recv()
            act = trace_step if isinstance(asked, Path) else take_steps
            connection.send(act(task, asked))
    except EOFError:
        return 0
    except Exception as error:
        traceback.print_exc()
        connection.send({"error": one_line(error)})
        return 1


def build(contender: Contender, work: Work):
    """An OurStep or a PeerStep. Their imports take seconds; a contender makes its own only."""
    if contender.is_ours:
        from benchmarks.ours import OurStep
        from benchmarks.projections import fused_projections

        with fused_projections() if contender.fused else nullcontext():
            return OurStep(work, contender.compiled, recompute=contender.recompute)
    from benchmarks.peers import PeerStep

    return PeerStep(contender.family, work, contender.compiled, contender.our_allocator)


def take_first_step(task) -> dict:
    """What `take_steps` says of it, and the engine's name.

    Raises:
        ValueError: it does not begin where an untrained model does.
    """
    first = take_steps(task, 1)
    if abs(first["loss"] - math.log(VOCAB_SIZE)) > LOSS_TOLERANCE:
        raise ValueError(f"the loss starts at {first['loss']:.3f}, not near ln({VOCAB_SIZE})")
    return first | {"engine": task.engine}


def take_steps(task, number: int) -> dict:
    """Seconds of each step, the last loss, the process's peak memory in bytes.

    On a GPU, which works on while Python goes ahead, each step counts as the mean of all.
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
    peak = peak_memory_bytes(task.device)
    return {"seconds": seconds, "loss": task.loss(), "peak_bytes": peak}


def trace_step(task, path: Path) -> dict:
    """Write a trace of one step of the first rank, for Perfetto or chrome://tracing."""
    with torch.profiler.profile() as profile:
        task.step()
        synchronize(task.device)
    if os.environ.get("RANK", "0") == "0":
        profile.export_chrome_trace(str(path))
    return {}


def one_line(error: Exception) -> str:
    """An exception's name and the first line of what it says, at most 200 characters."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"[:200]


def main() -> None:
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)  # so that its end is seen when this process ends
    code = serve(Connection(fd))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the shutdown of process groups, which waits for other ranks


if __name__ == "__main__":
    main()
