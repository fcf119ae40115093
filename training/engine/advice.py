"""Which engine would be better here, said at start where it is another than the one in use."""

from training.engine.communication import traffic
from training.engine.kinds import Kind, engines
from training.engine.memory import GIB, fits, needs
from training.engine.workload import Workload


def faster_engine(kind: Kind, work: Workload, room: int | None) -> str | None:
    """A line of advice where an engine that stands before the one in use fits, and sends less or
    spares the way to the CPU; else None.

    Their order is the rule: no ZeRO where DDP fits, ZeRO-2 before ZeRO-3, offload last. On CPUs DDP
    was the fastest of all and ZeRO-1 the next (docs/performance.md).

    Args:
        room: bytes that a process can have, None if unknown.
    """
    if room is None or work.processes == 1:
        return None
    sent = traffic(kind, work).sent
    for other in choices(work):
        if other.name == kind.name:
            return None
        less = traffic(other, work).sent
        gains = []
        if kind.offloads and not other.offloads and not work.on_cpu:
            gains.append("moves nothing to the CPU")
        if less < sent:
            two = _megabytes(less), _megabytes(sent)
            gains.append("sends {} MB per process and step, not {}".format(*two))
        if gains and fits(other, work, room):
            return (
                f"{other.name} would be faster: it {', '.join(gains)}, and fits into memory; "
                f"{how_to_choose(other)}"
            )
    return None


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.{0 if count >= 1e7 else 2}f}"


def lighter_engine(kind: Kind, work: Workload, room: int) -> str:
    """What to say of an engine that fits where the one in use does not; nothing if none does."""
    others = choices(work)
    names = [each.name for each in others]
    behind = others[names.index(kind.name) + 1 if kind.name in names else 0 :]
    for other in behind if work.processes > 1 else []:
        if fits(other, work, room):
            needed = needs(other, work) / GIB
            return f"; {other.name} needs {needed:.1f} GiB: {how_to_choose(other)}"
    return ""


def choices(work: Workload) -> list[Kind]:
    """The engines that take this optimizer, in the order of the advice."""
    muon = work.parameters.by_muon
    return [kind for kind in engines(work.config.dim) if kind.takes_muon or not muon]


def how_to_choose(kind: Kind) -> str:
    return (
        f"ENGINE={kind.config} bash run_accelerate.sh, or accelerate launch --config_file "
        f"configs/{kind.config}.yaml"
    )
