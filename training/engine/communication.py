"""What a process sends in an optimizer step, how long that takes, and what of it training waits
for."""

from dataclasses import dataclass

from training.engine.kinds import GPU, NVME, Kind
from training.engine.memory import is_bf16_optimizer, persistent_parameters, sum_bytes
from training.engine.workload import Workload

# Of the time of a micro-batch: forward takes one part, backward two (their matrix products).
BACKWARD = 2 / 3


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process sends to the others in one optimizer step, by when."""

    in_backward: int = 0  # gradients, while further ones are computed
    backwards: int = 1  # in so many of the step's backward passes
    in_step: int = 0  # weights, while others are computed with: in forward and backward
    after: int = 0  # when nothing is left to compute
    moved: int = 0  # between GPU and RAM or NVMe, besides

    @property
    def sent(self) -> int:
        return self.in_backward + self.in_step + self.after

    def waiting(
        self, *, seconds: float, micro_batches: int, bandwidth: float, host_bandwidth: float
    ) -> float:
        """Seconds of a step in which nothing is computed because of them.

        What is sent behind a computation is waited for as far as it takes longer.

        Args:
            seconds: of the step's computing.
            bandwidth: bytes per second that a process can send.
            host_bandwidth: bytes per second between GPU and RAM or NVMe.
        """
        behind = seconds * BACKWARD * self.backwards / micro_batches
        in_backward, in_step = self.in_backward / bandwidth, self.in_step / bandwidth
        late = max(0.0, in_backward - behind, in_backward + in_step - seconds)
        return late + self.after / bandwidth + self.moved / host_bandwidth


def traffic(kind: Kind, work: Workload) -> Traffic:
    """What an engine sends.

    Exchanges are rings (gloo's always, NCCL's where there is much to send): in an all-gather or a
    reduce-scatter a process sends (P - 1) / P of the whole, in an all-reduce, one after the other,
    twice that.

    DDP all-reduces fp32 gradients once a step, behind the last backward pass. ZeRO-1 does so in the
    training precision and hands round the new weights, in bf16 all of it after backward. ZeRO-2
    all-reduces gradients in each micro-batch (DeepSpeed's "use_multi_rank_bucket_allreduce") and
    keeps its share. ZeRO-3 reduce-scatters them, which gloo does by an all-reduce, and gathers the
    weights for forward and again for backward, but those that it has not let go of.

    Sources: Rajbhandari et al., https://arxiv.org/abs/1910.02054, section 7; DeepSpeed 0.19's code.
    benchmarks/engines.py measures it at a network device.
    """
    n, t = work.parameters.total, work.parameters.trained
    h, micro_batches = work.half, work.accumulation_steps
    ring = (work.processes - 1) / work.processes
    if kind.stage is None:
        return Traffic(in_backward=int(2 * ring * 4 * t))
    if kind.stage < 3:
        reductions = micro_batches if kind.stage == 2 else 1
        gradients, weights = int(2 * ring * h * t) * reductions, int(ring * h * t)
        moved = _moved(kind, work)
        if is_bf16_optimizer(kind, work):
            return Traffic(after=gradients + weights, moved=moved)
        return Traffic(in_backward=gradients, backwards=reductions, after=weights, moved=moved)
    small = persistent_parameters(kind, work)  # handed round once a step
    gathered = 2 * (n - small) - min(n - small, kind.reuse_distance // 2)
    return Traffic(
        in_backward=int((2 if work.on_cpu else 1) * ring * h * t) * micro_batches,
        backwards=micro_batches,
        in_step=int(ring * h * gathered) * micro_batches,
        after=int(ring * h * small),
        moved=_moved(kind, work, gathered * micro_batches + small),
    )


def _moved(kind: Kind, work: Workload, gathered: int = 0) -> int:
    """Bytes between GPU and RAM or NVMe in a step, of its share, as DeepSpeed's code has them.

    To an optimizer that is there go gradients in fp32; new weights go where they are kept. Below
    ZeRO-3 sums in fp32 are added up on the GPU, all others are sent to RAM in each micro-batch, and
    come back before the next one adds to them (under ZeRO-3 in every one). On NVMe state and
    gradients come and go. Weights come each time that they are `gathered`.
    """
    if work.on_cpu or not kind.offloads:
        return 0
    h, sums, micro_batches = work.half, sum_bytes(kind, work), work.accumulation_steps
    moved = 0
    if kind.optimizer_on != GPU:
        moved += 4
        if kind.stage == 3:
            moved += 2 * sums * micro_batches
        elif sums == h and micro_batches > 1:
            moved += sums * (2 * micro_batches - 1)
    if kind.optimizer_on == NVME:
        moved += 2 * (12 + 4)
    if kind.parameters_on == NVME or (kind.optimizer_on == GPU) != (kind.parameters_on == GPU):
        moved += h
    weights = h * gathered if kind.parameters_on != GPU else 0
    return int((moved * work.parameters.trained + weights) / work.processes)
