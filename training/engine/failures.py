"""Training that ends in one line: memory runs out, or a process is gone."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import UsageError
from training.arguments import TrainingArguments

# As PyTorch, NCCL and cuBLAS put it.
OUT_OF_MEMORY = "out of memory", "can't allocate memory", "ALLOC_FAILED"
# As gloo and NCCL put it.
ENDED = "Connection closed", "Connection reset", "Broken pipe", "remote process exited"
SILENT = "Connection timed out", "Timed out waiting"


def less_memory(args: TrainingArguments, use_flash_attn: bool) -> str:
    """Return what to type for a run that needs less."""
    ways = ["a smaller --batch_size with larger --accumulation_steps", "a shorter --max_seq_len"]
    if args.gradient_checkpointing != "blocks":
        ways.append("--gradient_checkpointing blocks")
    if not use_flash_attn:
        ways.append("--use_flash_attn")
    return f"{', '.join(ways)} need less"


@contextmanager
def one_line_failures(args: TrainingArguments, model_settings: dict) -> Iterator[None]:
    """Raise UsageError if memory runs out in here, or another process is gone."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        sentences = str(error).split(". ")
        has_ended, is_silent, no_memory = (
            any(said in str(error) for said in words) for words in (ENDED, SILENT, OUT_OF_MEMORY)
        )
        if no_memory or isinstance(error, MemoryError):
            advice = less_memory(args, model_settings.get("use_flash_attn", True))
            sizes = ". ".join(sentences[:3]) or "MemoryError"  # the others are about PyTorch
            raise UsageError(
                f"out of memory with --batch_size {args.batch_size} --accumulation_steps "
                f"{args.accumulation_steps}: {advice} ({sizes})"
            ) from error
        if has_ended or is_silent:
            what = "has ended, see what it said" if has_ended else "does not answer any more"
            raise UsageError(
                f"another process {what} ({sentences[0]}); --resume auto goes on from the last "
                "checkpoint"
            ) from error
        raise
