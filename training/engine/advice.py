"""Which engine would be faster here, said at start where it is another than the one in use."""

from collections.abc import Callable


def bytes_sent(
    n_parameters: int, zero_stage: int | None, processes: int, accumulation_steps: int, dtype: str
) -> int:
    """What a process sends in one optimizer step, in bytes.

    Each reduction of the gradients is a ring all-reduce, in which a process sends 2 (P − 1) / P of
    them: once a step, but with ZeRO-2, which keeps only its own share of their sum, in every
    micro-batch. ZeRO then hands round the new weights, an all-gather of (P − 1) / P. Both in the
    training precision; DDP's gradients are fp32 (Rajbhandari et al.,
    https://arxiv.org/abs/1910.02054, section 7; measured at a network device, docs/performance.md).

    Args:
        zero_stage: 1 or 2; None is DDP.
    """
    size = 4 if zero_stage is None or dtype == "float32" else 2
    reductions = accumulation_steps if zero_stage == 2 else 1
    gathers = 0 if zero_stage is None else 1
    return size * n_parameters * (2 * reductions + gathers) * (processes - 1) // processes


def faster_engine(
    zero_stage: int | None,
    processes: int,
    accumulation_steps: int,
    n_parameters: int,
    dtype: str,
    on_cpu: bool,
    fits: Callable[[int | None], bool],
) -> str | None:
    """A line of advice where another engine is faster than ZeRO-2 and fits, else None.

    On CPUs DDP was the fastest of all and ZeRO-1 the next (docs/performance.md). On GPUs, where
    nothing is measured yet, it is ZeRO-1, which sends the fewest bytes.

    Args:
        fits: whether the engine of a ZeRO stage, DDP of None, has the memory it needs.
    """
    if zero_stage != 2 or processes == 1 or accumulation_steps == 1:
        return None
    stage = next((stage for stage in ((None, 1) if on_cpu else (1,)) if fits(stage)), 2)
    if stage == 2:
        return None
    sent = [
        bytes_sent(n_parameters, each, processes, accumulation_steps, dtype) / 1e6
        for each in (stage, 2)
    ]
    name, how = ("ZeRO-1", 'set "stage": 1 in the DeepSpeed file')
    if stage is None:
        name, how = ("DDP", "launch with --multi_gpu in the place of DeepSpeed's flags or file")
    return (
        f"{name} would be faster: it exchanges gradients once per step and not in each of "
        f"{accumulation_steps} micro-batches ({sent[0]:,.0f} MB sent per process and step instead "
        f"of {sent[1]:,.0f}) and fits into memory; {how}"
    )
