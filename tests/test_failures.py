import pytest
import torch
from torch._inductor.exc import CppCompileError

from lm.common.errors import UsageError
from lm.training.arguments import TrainingArguments
from lm.training.failures import one_line_failures
from model.recompute import RECOMPUTE

ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of "
    "which 1.02 GiB is free. Process 1 has 22.6 GiB memory in use. Of the allocated memory 20 GiB "
    "is allocated by PyTorch."
)


def said(error: Exception, recompute: str = "off", **model_settings) -> str:
    """Return the message that replaces this error."""
    args = TrainingArguments(batch_size=24, accumulation_steps=2, gradient_checkpointing=recompute)
    with pytest.raises(UsageError) as raised, one_line_failures(args, model_settings):
        raise error
    return str(raised.value)


@pytest.mark.parametrize(
    ("error", "details"),
    [
        (torch.OutOfMemoryError(ON_A_GPU), "which 1.02 GiB is free)"),
        (RuntimeError("NCCL error: unhandled cuda error: out of memory"), "NCCL error"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_out_of_memory_names_the_flags_in_use_and_what_to_change(error, details):
    line = said(error, max_seq_len=1024, dim=64)
    flags = "--batch_size 24 --accumulation_steps 2"
    advice = "to use less memory, try a smaller --batch_size with larger "
    assert line.startswith(f"out of memory with {flags}: {advice}")
    assert details in line
    assert "Process 1" not in line
    assert "--use_flash_attn" not in line
    assert "--use_flash_attn" in said(error, use_flash_attn=False)
    for recompute in RECOMPUTE:
        named = "--gradient_checkpointing blocks" in said(error, recompute)
        assert named is (recompute != "blocks")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:157. GLHF!", "has ended"),
        ("NCCL error: remote process exited or there was a network error", "has ended"),
        ("[gloo/buffer.cc:81] Timed out waiting 1800000ms for recv operation", "does not answer"),
    ],
)
def test_a_lost_connection_to_another_process_is_explained(text, what):
    line = said(RuntimeError(text))
    assert line.startswith(f"another process {what}")
    assert f"({text.split('. ')[0]}); use --resume auto" in line


@pytest.mark.parametrize(
    ("output", "cause"),
    [("", "no output"), ("x.cpp: No space left\ncompilation ended", "x.cpp: No space left")],
)
def test_a_compiler_that_fails_or_is_stopped_by_ctrl_c_gives_one_line(output, cause):
    error = CppCompileError(["g++", "x.cpp"], output)
    text = f"CppCompileError: {error}\n\nSet TORCHDYNAMO_VERBOSE=1"
    stopped = f"the C++ compiler was stopped or failed ({cause})"
    assert said(RuntimeError(text)) == f"{stopped}; --compile off needs no compiler"


def test_other_errors_are_raised_unchanged():
    error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as raised, one_line_failures(TrainingArguments(), {}):
        raise error
    assert raised.value is error
