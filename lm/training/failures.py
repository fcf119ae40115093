"""Turn failures of a run into errors of one line, with advice."""

from collections.abc import Iterator
from contextlib import contextmanager

from lm.common.errors import TooLittleMemoryError, UsageError
from lm.training.arguments import TrainingArguments

# Parts of messages: OUT_OF_MEMORY are from PyTorch, NCCL and cuBLAS, the others from gloo and NCCL.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
ENDED = ("Connection closed", "Connection reset", "Broken pipe", "remote process exited")
SILENT = ("Connection timed out", "Timed out waiting")


@contextmanager
def one_line_failures(args: TrainingArguments, model_settings: dict) -> Iterator[None]:
    """Turn failures in this context into an error of one line: TooLittleMemoryError if memory ran
    out, UsageError if a C++ compiler failed, or if another process ended or does not answer."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        sentences = text.split(". ")
        if isinstance(error, MemoryError) or any(part in text for part in OUT_OF_MEMORY):
            advice = less_memory(args, model_settings.get("use_flash_attn", True))
            # Keep PyTorch's first three sentences: the requested size and the GPU's free memory.
            sizes = ". ".join(sentences[:3]) or "MemoryError"
            raise TooLittleMemoryError(
                f"out of memory with --batch_size {args.batch_size} --accumulation_steps "
                f"{args.accumulation_steps}: {advice} ({sizes})"
            ) from error
        if "C++ compile error" in text:  # Ctrl-C in a terminal also ends the compiler
            output = text.partition("Output:\n")[2].partition("Set TORCH")[0].strip() or "no output"
            said = f"the C++ compiler was stopped or failed ({output.splitlines()[0]})"
            raise UsageError(f"{said}; --compile off needs no compiler") from error
        if any(part in text for part in ENDED):
            what = "has ended, see its output"
        elif any(part in text for part in SILENT):
            what = "does not answer any more"
        else:
            raise
        raise UsageError(f"another process {what} ({sentences[0]}); use --resume auto") from error


def less_memory(args: TrainingArguments, use_flash_attn: bool) -> str:
    """Return advice: the flags that reduce the memory of a run."""
    ways = ["a smaller --batch_size with larger --accumulation_steps", "a shorter --max_seq_len"]
    if args.gradient_checkpointing != "blocks":
        ways.append("--gradient_checkpointing blocks")
    if not use_flash_attn:
        ways.append("--use_flash_attn")
    return f"to use less memory, try {', '.join(ways)}"
