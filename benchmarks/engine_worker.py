"""One process of one engine, under whatever launcher: takes steps, and counts.

    accelerate launch --config_file configs/zero2.yaml -m benchmarks.engine_worker OUT WORK STEPS

WORK is a Work as JSON. Rank 0 writes into OUT what `measure` returns. Bytes are those of the
loopback device, which belongs to these processes alone where they have a network namespace of their
own.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from training.engine.communication import traffic
from training.engine.workload import Workload

from benchmarks.matmul import synchronize
from benchmarks.ours import arguments, build_run, compute_gradient
from benchmarks.work import Work
from training.engine.launch import Engine, build_engine
from training.engine.memory import expect, peak_memory_bytes
from training.interruption import leave

WARMUP = 2  # steps whose traffic is not counted: engines learn the order of the layers in them


def loopback_bytes(table: Path = Path("/proc/self/net/dev")) -> int:
    """Sent by the loopback device of this process's network namespace since it is there."""
    lines = (line.split(":") for line in table.read_text("ascii").splitlines() if ":" in line)
    return next(int(counts.split()[8]) for name, counts in lines if name.strip() == "lo")


def meet(engine: Engine) -> None:
    if engine.processes > 1:
        distributed.barrier()


def load_libraries(engine: Engine) -> None:
    """What the first step would import, so that it does not count as the model's memory."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.sum().backward()
    torch.optim.AdamW([weight], fused=True).step()
    if engine.deepspeed is not None:
        import deepspeed.runtime.zero.muon.muon_optimizer
        import deepspeed.runtime.zero.stage3  # noqa: F401


def measure(work: Work, steps: int) -> dict:
    """Losses of all steps, seconds of one, what was sent per process and step, and memory: before
    there is a model, at most, and as expected; in bytes."""
    engine = build_engine(arguments(work))
    device = engine.accelerator.device
    load_libraries(engine)
    libraries = 0 if device.type == "cuda" else peak_memory_bytes(device)
    run = build_run(work, compiled=False, engine=engine)
    losses, seconds, sent = [], [], 0
    for step in range(1, steps + 1):
        if step == WARMUP + 1:
            meet(engine)
            sent = loopback_bytes()
            meet(engine)
        synchronize(device)
        started = time.perf_counter()
        loss = compute_gradient(run, step)
        run.update()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
    meet(engine)
    sent = loopback_bytes() - sent
    work = Workload.of(run.args, work.config, processes=engine.processes, device=device)
    return {
        "rank": engine.accelerator.process_index,
        "engine": engine.name,
        "losses": losses,
        "seconds": statistics.median(seconds[WARMUP:]),
        "sent": sent / engine.processes / (steps - WARMUP),
        "sent_expected": traffic(engine.kind, work).sent,
        "libraries": engine.largest(libraries),
        "peak": engine.largest(peak_memory_bytes(device)),
        "peak_expected": expect(engine.kind, work).peak,
    }


def main() -> None:
    out, work, steps = sys.argv[1:]
    measured = measure(Work(**json.loads(work)), int(steps))
    if measured["rank"] == 0:
        Path(out).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    finally:
        leave()
