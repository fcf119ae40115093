"""One process of one engine, under whatever launcher: takes steps, and counts.

    accelerate launch --config_file configs/zero2.yaml -m benchmarks.engine_worker OUT STEPS FLAGS

FLAGS are the training script's. Rank 0 writes into OUT what `measure` returns. Bytes are those of
the loopback device, which belongs to these processes alone where they have a network namespace of
their own.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import distributed

from benchmarks.matmul import synchronize
from benchmarks.ours import compute_gradient, start_run
from training.engine.estimate import estimate
from training.engine.usage import peak_memory_bytes
from training.interruption import leave

WARMUP = 2  # steps whose traffic is not counted: engines learn the order of the layers in them


def meet() -> None:
    if distributed.is_initialized():
        distributed.barrier()


def loopback_bytes() -> int:
    """Return the bytes that this network namespace's loopback device has sent since it exists."""
    table = Path("/proc/self/net/dev").read_text("ascii")
    lines = (line.split(":") for line in table.splitlines() if ":" in line)
    return next(int(counts.split()[8]) for name, counts in lines if name.strip() == "lo")


def load_libraries() -> int:
    """Import what a run would; return the bytes of the process then."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.sum().backward()
    torch.optim.AdamW([weight], fused=True).step()
    import deepspeed.runtime.zero.muon.muon_optimizer
    import deepspeed.runtime.zero.stage3  # noqa: F401

    return peak_memory_bytes(torch.device("cpu"))


def measure(flags: list[str], steps: int) -> dict:
    """Return the losses of all steps, seconds of one, bytes that were sent per process and step,
    and memory in bytes: at most, and as expected, libraries included."""
    libraries = load_libraries()
    run = start_run(flags)
    engine, device = run.engine, run.accelerator.device
    losses, seconds, sent = [], [], 0
    for step in range(1, steps + 1):
        if step == WARMUP + 1:
            meet()
            sent = loopback_bytes()
            meet()
        synchronize(device)
        started = time.perf_counter()
        loss = compute_gradient(run, step)
        run.clip_gradients()
        run.optimizer.step()
        run.optimizer.zero_grad()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
    meet()
    sent = loopback_bytes() - sent
    expected = estimate(engine.kind, run.prepared.workload(engine.processes, device, False))
    on_cpu = device.type == "cpu"
    return {
        "rank": engine.accelerator.process_index,
        "engine": engine.name.removesuffix(", not DeepSpeed"),
        "losses": losses,
        "seconds": statistics.median(seconds[WARMUP:]),
        "sent": sent / engine.processes / (steps - WARMUP),
        "sent_expected": expected.sent,
        "peak": engine.largest(peak_memory_bytes(device)),
        "peak_expected": expected.peak + (engine.largest(libraries) if on_cpu else 0),
    }


def main() -> None:
    out, steps, *flags = sys.argv[1:]
    measured = measure(flags, int(steps))
    if measured["rank"] == 0:
        Path(out).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    finally:
        leave()
