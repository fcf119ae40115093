"""Which engine would be faster here, said at start where it is another than the one in use."""

from training.memory import GIB

# Bytes per parameter that a process hands over in one exchange: gradients and weights in 16 bits
# under DeepSpeed.
HALF = 2


def bytes_moved(n_parameters: int, zero_stage: int, accumulation_steps: int) -> int:
    """What a process sends in one optimizer step, in bytes.

    ZeRO-1 reduces gradients once a step, ZeRO-2 in every micro-batch, for it keeps only its own
    share of their sum; both hand round the new weights (Rajbhandari et al.,
    https://arxiv.org/abs/1910.02054, section 7).
    """
    reductions = accumulation_steps if zero_stage == 2 else 1
    return HALF * n_parameters * (reductions + 1)


def faster_engine(
    zero_stage: int | None,
    processes: int,
    accumulation_steps: int,
    n_parameters: int,
    needed: int,
    free: int | None,
) -> str | None:
    """A line of advice where ZeRO-1 moves fewer bytes than ZeRO-2 and fits, else None.

    Args:
        needed: bytes that ZeRO-1 would take on one device (on a CPU: all processes together).
        free: bytes that are free there, None if unknown.
    """
    if zero_stage != 2 or processes == 1 or accumulation_steps == 1:
        return None
    if free is None or needed > free:
        return None
    two, one = (bytes_moved(n_parameters, stage, accumulation_steps) for stage in (2, 1))
    return (
        f"ZeRO-1 would move fewer bytes: it exchanges gradients once per step and not in each of "
        f"{accumulation_steps} micro-batches ({one / GIB:.2f} GiB per step instead of "
        f'{two / GIB:.2f}) and fits into memory; set "stage": 1 in the DeepSpeed file'
    )
