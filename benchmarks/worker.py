"""One process of one contender: does what it is told, one JSON command per line of stdin.

    python -m benchmarks.worker ANSWER_FD

Allocator settings, compiled code and peak memory belong to a process, so each contender has its
own. Between commands it waits for the next line and uses no CPU. Answers, one JSON object per
command, go to the file descriptor ANSWER_FD: what libraries print must not come between them.

    {"command": "build", "kind": "ours" | "peer" | "matmul", "work": {...}, "options": {...}}
        makes model and optimizer, does the first step; answers what was built
    {"command": "steps", "number": N}  does N steps; answers the seconds of each and the loss
    {"command": "peak"}                FLOP/s of matrix products (kind "matmul")
    {"command": "memory"}              peak bytes of this process, bytes that are still free
    {"command": "quit"}                ends; so does the end of stdin

A command that fails answers {"error": one line}, leaves the traceback on stderr and ends the
process.
"""

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TextIO

import torch

from benchmarks.matmul import MatrixProducts, synchronize
from benchmarks.work import VOCAB_SIZE, Work
from training.engine.device import device_name
from training.engine.memory import free_memory
from training.log import peak_memory_bytes

LOSS_TOLERANCE = 0.5  # nats around ln(VOCAB_SIZE), where an untrained model starts


class Server:
    """Carries out commands; see the module's docstring."""

    def __init__(self):
        self.task: Any = None  # OurStep, PeerStep or MatrixProducts

    def answer(self, message: dict) -> dict:
        message = dict(message)
        return getattr(self, "do_" + message.pop("command"))(**message)

    def do_build(self, kind: str, work: dict, options: dict) -> dict:
        work = Work(**work)
        if kind == "matmul":
            self.task = MatrixProducts(work)
            return self._describe()
        if kind == "ours":
            from benchmarks.ours import OurStep

            self.task = OurStep(work, options)
        else:
            from benchmarks.peers import PeerStep

            self.task = PeerStep(work, options)
        expected = work.counts[0]
        if self.task.parameters != expected:
            raise ValueError(f"{self.task.parameters:,} parameters instead of {expected:,}")
        first = self.do_steps(1)
        if abs(first["loss"] - math.log(VOCAB_SIZE)) > LOSS_TOLERANCE:
            raise ValueError(f"the loss starts at {first['loss']:.3f}, not near ln({VOCAB_SIZE})")
        if options["compiled"] and not compiled_graphs():
            raise RuntimeError("asked for compiled, but nothing was compiled")
        about = {"parameters": expected, "loss": first["loss"], "engine": self.task.description}
        return self._describe() | about | {"compiled_graphs": compiled_graphs()}

    def do_steps(self, number: int) -> dict:
        """On a GPU, which works on while Python goes ahead, each step counts as the mean of all."""
        task, on_gpu = self.task, self.task.device.type == "cuda"
        task.wait()
        synchronize(task.device)
        clock = [time.perf_counter()]
        for _ in range(number):
            task.step()
            clock.append(time.perf_counter())
        synchronize(task.device)
        seconds = [after - before for before, after in pairwise(clock)]
        if on_gpu:
            seconds = [(time.perf_counter() - clock[0]) / number] * number
        return {"seconds": seconds, "loss": task.loss()}

    def do_peak(self) -> dict:
        return self.task.peak()

    def do_memory(self) -> dict:
        device = self.task.device
        return {"peak": peak_memory_bytes(device), "free": free_memory(device)}

    def _describe(self) -> dict:
        device = self.task.device
        return {
            "device": device.type,
            "device_name": device_name(device),
            "threads": torch.get_num_threads(),
        }


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    if "torch._dynamo" not in sys.modules:  # importing it would take an eager contender a second
        return 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def serve(commands: Iterable[str], answers: TextIO) -> int:
    """Answer every line until "quit" or the end; returns the exit code."""
    server = Server()
    for line in commands:
        message = json.loads(line)
        if message["command"] == "quit":
            break
        try:
            answer = server.answer(message)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)
        if "error" in answer:
            return 1
    return 0


def one_line(error: Exception) -> str:
    """An exception's name and the first line of what it says, at most 200 characters."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"[:200]


def main() -> None:
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)  # so that its end is seen when this process ends
    with os.fdopen(fd, "w") as answers:
        code = serve(sys.stdin, answers)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the shutdown of process groups, which waits for other ranks


if __name__ == "__main__":
    main()
