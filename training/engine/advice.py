"""Which engine would be better here, said at start where it is another than the one in use."""

from training.engine.communication import traffic
from training.engine.kinds import ENGINES, Kind
from training.engine.memory import GIB, expect, fits
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
    for other in ENGINES:
        if other.name == kind.name:
            return None
        less = traffic(other, work).sent
        if fits(other, work, room) and (kind.offloads or less < sent):
            megabytes = f"{less / 1e6:,.0f} MB sent per process and step instead of"
            return (
                f"{other.name} would be faster: it {_spares(kind, work)} ({megabytes} "
                f"{sent / 1e6:,.0f}) and fits into memory; {how_to_choose(other)}"
            )
    return None


def lighter_engine(kind: Kind, work: Workload, room: int) -> str:
    """What to say of an engine that fits where the one in use does not; nothing if none does."""
    names = [each.name for each in ENGINES]
    behind = ENGINES[names.index(kind.name) + 1 if kind.name in names else 0 :]
    for other in behind if work.processes > 1 else []:
        if fits(other, work, room):
            needs = expect(other, work).peak / GIB
            return f"; {other.name} needs {needs:.1f} GiB: {how_to_choose(other)}"
    return ""


def how_to_choose(kind: Kind) -> str:
    return (
        f"ENGINE={kind.config} bash run_accelerate.sh, or accelerate launch --config_file "
        f"configs/{kind.config}.yaml"
    )


def _spares(kind: Kind, work: Workload) -> str:
    """What the engine in use does and those before it do not."""
    if kind.offloads:
        return "keeps everything where it is computed"
    if kind.stage == 3:
        return "gathers no weights"
    if work.accumulation_steps == 1:
        return "hands round no weights"
    return (
        "exchanges gradients once per step and not in each of "
        f"{work.accumulation_steps} micro-batches"
    )
