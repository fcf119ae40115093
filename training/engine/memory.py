"""How much memory a run will need on each device, before it runs out."""

import os
import resource
from pathlib import Path

import torch

from model import LMConfig

GIB = 2**30
# What a process needs besides: Python and PyTorch; on a GPU workspaces, and blocks cut up.
OVERHEAD = GIB


def model_state_bytes(
    n_parameters: int,
    dtype: str,
    zero_stage: int | None,
    world_size: int,
    offload: bool = False,
    n_by_muon: int = 0,
) -> int:
    """Weights, gradients and AdamW's two moments on one device, in bytes. Muon, which steps
    n_by_muon of the parameters, keeps one.

    Without DeepSpeed all of it is fp32: 4 + 4 + 8 bytes per parameter (weights are cast to bf16
    layer by layer). DeepSpeed in 16 bits keeps 2 bytes of weights and 2 of gradients, and 4 + 8 of
    fp32 master weights and moments plus 4 of accumulated fp32 gradients; ZeRO-1 divides master and
    moments among the processes, ZeRO-2 the gradients too, ZeRO-3 the weights as well (Rajbhandari
    et al., https://arxiv.org/abs/1910.02054).
    """
    optimizer = 8 * n_parameters - 4 * n_by_muon
    if zero_stage is None:
        return 8 * n_parameters + optimizer
    weights = n_parameters * (2 if dtype != "float32" else 4)
    gradients = weights + 4 * n_parameters
    optimizer += 4 * n_parameters  # master weights
    if zero_stage >= 1:
        optimizer /= world_size
    if zero_stage >= 2:
        gradients /= world_size
    if zero_stage >= 3:
        weights /= world_size
    return int(weights + gradients + (0 if offload else optimizer))


def activation_bytes(
    config: LMConfig,
    batch_size: int,
    dtype: str,
    on_cpu: bool = False,
    keeps_scores: bool = False,
    recompute: str = "off",
) -> int:
    """What forward keeps for backward in one micro-batch, in bytes: an estimate, good to about a
    third.

    Counted per token and layer: inputs of the two norms and their fp32 copies, inputs of the seven
    matrix products, both halves of SwiGLU; with plain attention, or keeps_scores
    (`attention_kernel` tells), also two T × T fp32 and one 16-bit matrix per head, with the CPU's
    blocks of rows somewhat more than half of the 16-bit one; and the logits three times, once in
    half and twice in full precision.

    With --gradient_checkpointing only a block's input is counted, and if attention is not
    recomputed its output and matrices; besides a single block as above, or the logits, which are
    gone before it is there.
    """
    half = 2 if dtype != "float32" else 4
    tokens = batch_size * config.max_seq_len
    per_layer = config.dim * (6 * half + 4 * 4) + config.hidden_dim * 4 * half
    plain, attention = keeps_scores or not config.use_flash_attn, 0
    if plain:
        attention = config.n_heads * config.max_seq_len * (8 + half)
    elif on_cpu:
        attention = config.n_heads * (config.max_seq_len // 2 + 32) * half
    per_layer, logits = per_layer + attention, config.vocab_size * (half + 8)
    if recompute == "off":
        return int(tokens * (config.n_layers * per_layer + logits))
    kept = config.dim * half
    if recompute == "selective" and not plain:  # of plain attention nothing can be kept
        kept += config.dim * half + attention
    return int(tokens * (config.n_layers * kept + max(per_layer, logits)))


def ram_warning(
    n_parameters: int, dtype: str, processes: int, optimizer: str | None, parameters: str | None
) -> str | None:
    """What to say before an engine is built that offloads more than there is: a process that the
    system kills for memory says nothing. None if there is room, or nobody knows.

    Counted per parameter: fp32 weights, two moments and two copies of the gradient (4 bytes each),
    of which the last two stay in RAM where the others are on NVMe, and the model's own weights; and
    in one process 12 bytes of a checkpoint that is put together.

    Args:
        optimizer: where it is, "cpu", "nvme" or None, which is not offloaded.
        parameters: the same.
    """
    each = {None: 0, "nvme": 8, "cpu": 20}[optimizer]
    if parameters == "cpu":
        each += 4 if dtype == "float32" else 2
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    needed = int(n_parameters * (each * here / processes + 12))
    free = free_memory(torch.device("cpu"))
    if not each or free is None or needed <= free:
        return None
    return (
        f"WARNING: what is offloaded is expected to need {needed / GIB:.1f} GiB of RAM, and "
        f"{free / GIB:.1f} are free: the system may end a process without a word; more machines, "
        "NVMe or a smaller model need less"
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken: of the GPU, or of RAM within a container's limit.

    None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in used.read_text().splitlines())
        free = min(free, int(text) - int(stat["anon"]))  # the rest can be reclaimed
    return free


def available_memory(device: torch.device, processes: int) -> int | None:
    """Bytes that this process can have in all: what it holds already, and its share of what is
    free, for on a CPU the processes of a machine share one memory.

    None where the system does not say.
    """
    free = free_memory(device)
    if free is None or device.type == "cuda":
        return free if free is None else free + torch.cuda.memory_reserved(device)
    resident, shared = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3])
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return free // sharing + (resident - shared) * resource.getpagesize()
