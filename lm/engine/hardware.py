"""Describe the machine. Set the memory allocator and the number of threads of the process."""

import ctypes
import os
import resource
import shutil
import subprocess
import sys
import timeit
from contextlib import suppress

import psutil
import torch

from lm.common.control_groups import group_limits
from lm.common.errors import UsageError
from lm.common.numbers import available_cores, counted
from model import LMConfig
from model.attention import takes_grouped_heads

GIB = 2**30
PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
# Parts of GPU names → TFLOP/s of the GPU in each of PRECISIONS, for dense matrix products that
# accumulate in fp32 (manufacturers' data sheets). The first match counts: longer names come first.
PEAKS = {
    "GB200": (2500, 2500, 1250, 80),
    "B300, B200": (2250, 2250, 1125, 75),
    "H100 PCIe, H800 PCIe": (756, 756, 378, 51),
    "H200 NVL, H100 NVL": (835, 835, 417.5, 60),
    "GH200, H200, H100, H800": (989, 989, 494.5, 67),
    "H20": (148, 148, 74, 44),
    "A100, A800": (312, 312, 156, 19.5),
    "A40": (149.7, 149.7, 74.8, 37.4),
    "A10G": (70, 70, 35, 35),
    "A10": (125, 125, 62.5, 31.2),
    "L40S": (362, 362, 183, 91.6),
    "L40": (181, 181, 90.5, 90.5),
    "L4": (121, 121, 60, 30.3),
    "T4": (None, 65, None, 8.1),
    "V100 SXM2": (None, 125, None, 15.7),
    "RTX 6000 Ada": (364.2, 364.2, 182.1, 91.1),
    "RTX A6000": (154.8, 154.8, 77.4, 38.7),
    "RTX 5090": (209.5, 209.5, 104.8, 104.8),
    "RTX 5080": (112.6, 112.6, 56.3, 56.3),
    "RTX 4090": (165.2, 165.2, 82.6, 82.6),
    "RTX 4080": (97.5, 97.5, 48.7, 48.7),
    "RTX 3090 Ti": (80, 80, 40, 40),
    "RTX 3090": (71, 71, 35.6, 35.6),
    "MI300X": (1307, 1307, 653.7, 163.4),
}
# With one of these words, a name of PEAKS means another GPU, whose peak is unknown.
RELATIVES = {"Laptop", "D", "Ti", "SUPER", "MIG"}
# The keys are values of torch.nn.attention.SDPBackend.
KERNELS = {1: "flash attention", 2: "memory-efficient attention", 3: "cuDNN attention"}
KERNELS[0] = "all T × T scores: PyTorch has no fused kernel for these shapes here"
# The keys are M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of glibc's malloc.h.
KEEP_FREED = {-4: 0, -1: -1, -2: 256 * 2**20}


def require_usable_gpu() -> None:
    """Raise UsageError if this machine has a GPU that this PyTorch cannot use."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        try:  # a computation fails if this PyTorch has no code for the GPU
            torch.ones(1, device=f"cuda:{index}").sum().item()
            return
        except RuntimeError as error:
            name = torch.cuda.get_device_name(index)
            why = str(error).splitlines()[0]
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if hidden or not shutil.which("nvidia-smi"):
            return
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        if not listed.startswith("GPU"):
            return
        name = listed.splitlines()[0]
        built = torch.version.cuda
        why = f"it is built for CUDA {built}" if built else "it is built without CUDA"
    raise UsageError(
        f"PyTorch {torch.__version__} cannot use {name} ({why}): update the driver, or install "
        "another PyTorch, or train on the CPU with CUDA_VISIBLE_DEVICES= before the command"
    )


def has_bf16() -> bool:
    """Return whether the GPU computes in bfloat16. NVIDIA GPUs do since Ampere."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def cpu_emulates_bf16() -> bool:
    """Return whether this CPU multiplies bf16 matrices more slowly than fp32 matrices. Processors
    without bf16 instructions do: they emulate bf16."""

    matrices = [torch.ones(256, 256, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    # The shortest times count, and the two products take turns: other programs may use the CPU.
    times = [[timeit.timeit(lambda x=x: x @ x, number=1) for x in matrices] for _ in range(20)]
    bf16, fp32 = map(min, zip(*times, strict=True))
    return bf16 > 1.3 * fp32  # emulated bf16 takes two to four times as long


def default_dtype(device_type: str) -> str:
    """Return the precision in which a trained model writes text: 16 bits on a GPU."""
    if device_type == "cpu":
        return "float32"
    return "bfloat16" if has_bf16() else "float16"


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the number of threads on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'threads')} per process"


def peak_flops(name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of the device with this name, or None if PEAKS does not give it."""
    words = f" {name} ".replace("-", " ")
    for keys, peaks in PEAKS.items():
        for key in keys.split(", "):
            if f" {key} " in words:
                peak = peaks[PRECISIONS.index(precision)]
                others = set(words.split()) - set(key.split())
                return None if others & RELATIVES or peak is None else peak * 1e12
    return None


def attention_kernel(config: LMConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Return a description of the attention kernel that will run."""
    if not config.use_flash_attn:
        return "plain: all T × T scores (--use_flash_attn for the fast paths)"
    if device.type == "cpu" and config.dropout:
        return "plain: all T × T scores (the fast path on a CPU has no dropout)"
    if device.type == "cpu":
        return "blocks of rows"
    n_kv_heads = config.n_kv_heads if takes_grouped_heads(dtype) else config.n_heads
    shape = (config.max_seq_len, config.head_dim)
    # q and k need gradients, because not every kernel has a backward pass for every shape.
    q = torch.empty(1, config.n_heads, *shape, dtype=dtype, device=device, requires_grad=True)
    k = torch.empty(1, n_kv_heads, *shape, dtype=dtype, device=device, requires_grad=True)
    grouped = n_kv_heads != config.n_heads
    choice = torch._fused_sdp_choice(
        q, k, k, dropout_p=config.dropout, is_causal=True, enable_gqa=grouped
    )
    return KERNELS.get(choice, f"PyTorch's fused kernel number {choice}")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak number of bytes of this process: of tensors on its GPU, or of RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS gives bytes, Linux KiB


def available_memory(device: torch.device, processes: int) -> int:
    """Return the bytes that this process can use, including the bytes that it uses now. On a
    CPU, the processes share the RAM of the machine or of their container. Their number is
    `processes` if no launcher says it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    free = psutil.virtual_memory().available
    limits = group_limits("memory", ["memory.max"], ["memory.limit_in_bytes"])
    for group, (limit,) in limits.items():
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = stat.get("anon") or stat["total_rss"]  # in use, without caches; version 2 or 1
        free = min(free, limit - int(used))
    mine = psutil.Process().memory_info()
    return free // processes_here(processes) + mine.rss - getattr(mine, "shared", 0)


def keep_freed_memory() -> None:
    """Make glibc's allocator, if there is one, keep freed memory.
    By default glibc gives large blocks back to the system. Each page of the next block then causes
    a page fault. On a CPU page faults took a third of a step or more (docs/performance.md)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        for name, value in KEEP_FREED.items():
            libc.mallopt(name, value)


def processes_here(otherwise: int = 1) -> int:
    """Return the number of processes on this machine, or `otherwise` if no launcher says it.
    DeepSpeed's launcher sets LOCAL_SIZE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or otherwise)


def set_threads(typed: int | None = None) -> None:
    """Use `typed` CPU threads in this process. None: as many as the user's OMP_NUM_THREADS says, or
    an equal part of this machine's cores for each of its processes."""
    if typed is None and not user_sets_threads():
        typed = max(1, available_cores() // processes_here())
    if typed is not None:  # else PyTorch has read OMP_NUM_THREADS
        torch.set_num_threads(typed)


def user_sets_threads() -> bool:
    """Return whether the user has set OMP_NUM_THREADS. Some launchers set this variable to 1 for
    their processes. In this case the environment of the launcher process tells."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads == "1" and {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & {*os.environ}:
        threads = None
        with suppress(psutil.Error, AttributeError):  # no parent process, or another user's
            threads = psutil.Process().parent().environ().get("OMP_NUM_THREADS")
    return threads is not None
