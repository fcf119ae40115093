"""Running out of memory, said in one line that names the flags."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import UsageError
from training.arguments import TrainingArguments

# As PyTorch, NCCL and cuBLAS put it; only PyTorch's allocator for GPUs has an exception of its own.
SAID = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def less_memory(use_flash_attn: bool) -> str:
    """What to type for a run that needs less."""
    advice = (
        "a smaller --batch_size with larger --accumulation_steps needs less and keeps the global "
        "batch; a shorter --max_seq_len needs less too"
    )
    return advice if use_flash_attn else f"{advice}, and so does --use_flash_attn"


@contextmanager
def one_line_out_of_memory(args: TrainingArguments, model_settings: dict) -> Iterator[None]:
    """Raises UsageError: the GPU's memory, or the CPU's, ran out in here.

    Args:
        model_settings: those that were typed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and not any(said in text for said in SAID):
            raise
        typed = {name: getattr(args, name) for name in ("batch_size", "accumulation_steps")}
        typed |= {name: model_settings[name] for name in ("max_seq_len",) if name in model_settings}
        in_use = " ".join(f"--{name} {value}" for name, value in typed.items())
        # The first sentences have the sizes, the others are about PyTorch's allocator.
        details = ". ".join(text.split(". ")[:3]) or type(error).__name__
        advice = less_memory(model_settings.get("use_flash_attn", True))
        raise UsageError(f"out of memory with {in_use}: {advice} ({details})") from error
