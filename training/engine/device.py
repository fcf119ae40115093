"""This machine: precisions, peak FLOP/s, attention kernel, memory and cores."""

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from common.errors import UsageError
from common.numbers import available_cores, counted
from model import LMConfig
from model.attention import takes_grouped_heads

GIB = 2**30
# TFLOP/s of dense matrix products that are summed in fp32, from the makers' data sheets: in bf16,
# fp16, TF32 and fp32. First match wins: longer names first.
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
PRECISIONS = ("bf16", "fp16", "tf32", "fp32")  # the columns
# Parts of names that mean another device: laptop chips, chips cut down or not, MIG slices.
RELATIVES = {"Laptop", "D", "Ti", "SUPER", "MIG"}
# By the numbers of torch.nn.attention.SDPBackend.
KERNELS = {
    0: "all T × T scores: no fused kernel of PyTorch takes these shapes here",
    1: "flash attention",
    2: "memory-efficient attention",
    3: "cuDNN attention",
}
# glibc's M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD (malloc.h).
KEEP_FREED = {-4: 0, -1: -1, -2: 256 * 2**20}


def require_usable_gpu() -> None:
    """Raise UsageError if there is a GPU that this PyTorch cannot use."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        try:
            torch.ones(1, device=f"cuda:{index}").sum().item()
            return
        except RuntimeError as error:
            name, why = torch.cuda.get_device_name(index), str(error).splitlines()[0]
    else:
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not shutil.which("nvidia-smi"):
            return
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        if not listed.startswith("GPU"):
            return
        name, why = listed.splitlines()[0], f"it is built for CUDA {torch.version.cuda}"
    raise UsageError(
        f"PyTorch {torch.__version__} cannot use {name} ({why}): update the driver, or install "
        "another PyTorch; CUDA_VISIBLE_DEVICES= in front trains on the CPU"
    )


def has_bf16() -> bool:
    """Return whether the GPU computes in bfloat16, as GPUs from Ampere on do."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def matrix_precision(mixed_precision: str) -> str:
    """Return the precision of matrix products, one of PRECISIONS."""
    if mixed_precision != "no":
        return mixed_precision
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'threads')} per process"


def peak_flops(name: str, precision: str) -> float | None:
    """Return a device's peak in FLOP/s in one of PRECISIONS, None if unknown."""
    words = f" {name} ".replace("-", " ")
    for keys, peaks in PEAKS.items():
        for key in keys.split(", "):
            before, found, after = words.partition(f" {key} ")
            if found:
                others = set(f"{before} {after}".split())
                peak = peaks[PRECISIONS.index(precision)]
                return None if others & RELATIVES or peak is None else peak * 1e12
    return None


def mfu(
    tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int
) -> float | None:
    """Return the share of the devices' peak that model FLOPs use, None if unknown."""
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * devices)


def attention_kernel(
    config: LMConfig, dtype: torch.dtype, device: torch.device
) -> tuple[str, bool]:
    """Return the attention that runs, and whether it keeps all T × T scores."""
    if not config.use_flash_attn:
        return "plain: all T × T scores (--use_flash_attn for the fast paths)", True
    if device.type == "cpu":
        if config.dropout:
            return "plain: all T × T scores (blocks of rows have no dropout)", True
        return "blocks of rows", False
    n_kv_heads = config.n_kv_heads if takes_grouped_heads(dtype) else config.n_heads
    shape = config.max_seq_len, config.head_dim
    q, k = (  # with gradients: not every kernel has a backward pass for every shape
        torch.empty(1, heads, *shape, dtype=dtype, device=device, requires_grad=True)
        for heads in (config.n_heads, n_kv_heads)
    )
    grouped = n_kv_heads != config.n_heads
    choice = torch._fused_sdp_choice(
        q, k, k, dropout_p=config.dropout, is_causal=True, enable_gqa=grouped
    )
    return KERNELS.get(choice, f"PyTorch's fused kernel number {choice}"), choice == 0


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has had so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes or kilobytes


def available_memory(device: torch.device, processes: int) -> int | None:
    """Return the bytes that this process can have in all; None without /proc.
    The processes of a machine share its RAM, within a container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    meminfo, cgroup = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if not meminfo.exists():
        return None
    free = int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) * 1024
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        stat = (cgroup / "memory.stat").read_text().split()
        free = min(free, int(text) - int(stat[stat.index("anon") + 1]))
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return free // sharing + (resident - shared) * resource.getpagesize()


def keep_freed_memory() -> bool:
    """Have glibc's allocator keep what is freed; return False without glibc.

    By default it gives large blocks back, and gets zeroed pages one fault at a
    time: a third of the time on a CPU (docs/performance.md).
    """
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(name, value) for name, value in KEEP_FREED.items())


def use_all_cores() -> None:
    """Divide this machine's cores among its processes; launchers give each one."""
    environ = os.environ
    launched = "LOCAL_WORLD_SIZE" in environ or "ACCELERATE_MIXED_PRECISION" in environ
    asked = environ.get("OMP_NUM_THREADS")
    if asked is None or (launched and asked == "1"):
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, available_cores() // processes))
