"""Training that ends without anybody's mistake, in one line: no memory, a process gone."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import UsageError
from training.arguments import TrainingArguments

# As PyTorch, NCCL and cuBLAS put it; only PyTorch's allocator for GPUs has an exception of its own.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
# What to say of another process, and how gloo and NCCL put it.
ELSEWHERE = {
    "has ended, see what it said": (
        *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
        "remote process exited",
    ),
    "does not answer any more": ("Connection timed out", "Timed out waiting"),
}


def less_memory(args: TrainingArguments, use_flash_attn: bool) -> str:
    """Return what to type for a run that needs less."""
    advice = (
        "a smaller --batch_size with larger --accumulation_steps needs less and keeps the global "
        "batch; "
    )
    if args.gradient_checkpointing != "blocks":
        advice += "--gradient_checkpointing blocks needs less and keeps the losses, in more time; "
    advice += "a shorter --max_seq_len needs less too"
    return advice if use_flash_attn else f"{advice}, and so does --use_flash_attn"


@contextmanager
def one_line_failures(args: TrainingArguments, model_settings: dict) -> Iterator[None]:
    """Raise UsageError if memory runs out in here, or another process ends while this one waits.

    Args:
        model_settings: those that were typed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        sentences = text.split(". ")
        if isinstance(error, MemoryError) or any(said in text for said in OUT_OF_MEMORY):
            flags = {name: getattr(args, name) for name in ("batch_size", "accumulation_steps")}
            if "max_seq_len" in model_settings:
                flags["max_seq_len"] = model_settings["max_seq_len"]
            in_use = " ".join(f"--{name} {value}" for name, value in flags.items())
            advice = less_memory(args, model_settings.get("use_flash_attn", True))
            sizes = ". ".join(sentences[:3]) or "MemoryError"  # the others are about PyTorch
            raise UsageError(f"out of memory with {in_use}: {advice} ({sizes})") from error
        for what, said_so in ELSEWHERE.items():
            if any(said in text for said in said_so):
                raise UsageError(
                    f"another process {what} ({sentences[0]}); --resume auto goes on from the last "
                    "checkpoint"
                ) from error
        raise
