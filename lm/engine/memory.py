"""Estimate the memory of a training process under each engine.

Bytes per parameter in fp32: 4 for the weight, 4 for the gradient, 8 for AdamW's moments. Under
DeepSpeed a weight in 16 bits has 2 bytes, and the optimizer holds a copy in fp32 (4 bytes). ZeRO-1
divides this copy and the moments among the processes, ZeRO-2 also the sums of gradients, ZeRO-3
also the weights (Rajbhandari et al., https://arxiv.org/abs/1910.02054). On a CPU the estimate is
within 15% of measurements (tests/test_memory.py), on an H200 it was up to 7% above them
(docs/performance.md). For other GPUs `fits` adds a margin.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lm.engine.hardware import GIB
from lm.engine.strategy import CPU, GPU, NVME, Strategy, strategy_of
from model import Transformer
from model.loss import tokens_at_once

OVERHEAD = GIB  # bytes of Python, PyTorch and its workspaces
MARGIN = 4 / 3  # factor for activations and buffers on a GPU
CPU_KEEPS = 1.5  # factor for activations on a CPU: some freed blocks fit no later tensor
CPU_COPIES, CPU_COPIES_3 = 7, 9  # copies of weights on a CPU: at stages 1 and 2; at stage 3
NVME_BUFFERS = 5 * 50_000_000  # elements: default buffer_count × zero_infinity.json's buffer_size
SUB_GROUP = 100_000_000  # zero_infinity.json's sub_group_size: parameters updated at a time
LARGEST_BATCH = 4096  # sequences in the largest micro-batch that is tried


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model and the settings of one optimizer step of a process."""

    args: Any  # the training flags, see engine.py
    shapes: Transformer  # the trained model with its adapters, on the meta device
    processes: int
    device: torch.device  # where the process trains; this machine need not have such a device
    compiled: bool
    masked: bool = False  # True if attention gets a mask: rows of packed conversations
    teacher: Transformer | None = None  # the model to learn from, on the meta device
    teacher_config: dict | None = None  # DeepSpeed's, if ZeRO-3 divides the teacher

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def itemsize(self) -> int:
        """Bytes per number in the precision of forward and backward."""
        return 4 if self.args.dtype == "float32" else 2

    @property
    def trained(self) -> int:
        """Number of parameters that are not frozen."""
        return sum(p.numel() for p in self.shapes.parameters() if p.requires_grad)


class Estimate(NamedTuple):
    """Bytes of one process. `held` and `working` are on its GPU, or in RAM without a GPU."""

    held: float  # weights, gradients and optimizer state, and the weights of a teacher
    working: float  # the peak of activations, logits and buffers
    ram: float  # offloaded to RAM, and RAM that buffers parameters on NVMe
    nvme: float  # offloaded to NVMe

    @property
    def peak(self) -> float:
        return self.held + self.working


def estimate(strategy: Strategy, work: Workload) -> Estimate:
    """Return the memory of one process under an engine."""
    if work.on_cpu:  # offloaded tensors stay in the same RAM
        strategy = replace(strategy, optimizer_on=GPU, parameters_on=GPU)
    n, t, h = work.shapes.num_parameters(), work.trained, work.itemsize
    share = 1 / work.processes
    moments = 8 * t
    if work.args.optimizer == "muon":  # per matrix of a block Muon has one moment, AdamW two
        layers = work.shapes.layers.parameters()
        moments -= 4 * sum(p.numel() for p in layers if p.requires_grad and p.dim() > 1)
    weights, gradients, optimizer = 4 * t + h * (n - t), 4 * t, moments
    if strategy.stage:  # for the formulas see the docstring of this file
        weights = h * n * (share if strategy.stage == 3 else 1)
        gradients = (4 if strategy.fp32_sums else h) * t * (share if strategy.stage > 1 else 1)
        optimizer = (4 * t + moments) * share
        gradients += (4 if strategy.fp32_sums else h) * t * strategy.coalesces
    places = {GPU: 0, CPU: 0, NVME: 0}
    offloads = strategy.optimizer_on != GPU
    places[CPU if offloads and strategy.stage == 3 else GPU] += gradients
    places[strategy.parameters_on] += weights
    places[strategy.optimizer_on] += optimizer
    if offloads:
        places[strategy.optimizer_on] += 4 * t * share  # fp32 gradients for the optimizer
        places[CPU] += h * t * share * (strategy.stage < 3)  # weights on their way to the GPU
    if strategy.optimizer_on == NVME:  # fp32 weights, gradients and moments while they are updated
        places[CPU] += 16 * min(t * share, SUB_GROUP)
    if strategy.parameters_on == NVME:
        places[CPU] += h * NVME_BUFFERS
    working = _activations(strategy, work) + _buffers(strategy, work)
    if work.teacher:
        engine = strategy_of(work.teacher_config)
        if engine.stage == 3:
            working += h * _gathered(engine, work.teacher)
        place = GPU if work.on_cpu else engine.parameters_on
        places[place] += h * work.teacher.num_parameters() * (share if engine.stage == 3 else 1)
    return Estimate(places[GPU], working, places[CPU], places[NVME])


def _buffers(strategy: Strategy, work: Workload) -> float:
    """Return the bytes of the buffers for the exchange of gradients and weights."""
    n, t, h = work.shapes.num_parameters(), work.trained, work.itemsize
    if strategy.stage is None:  # with accumulation DDP needs buckets in addition to the gradients
        return 4 * t if work.processes > 1 and work.args.accumulation_steps > 1 else 0
    if work.on_cpu:
        return h * n * (CPU_COPIES_3 if strategy.stage == 3 else CPU_COPIES)
    buffers = 2 * h * min(t, strategy.reduce_bucket)
    if strategy.stage == 3:
        buffers += h * _gathered(strategy, work.shapes)
    if strategy.stage == 1 and strategy.fp32_sums and work.args.dtype == "bfloat16":
        buffers += 8 * t  # DeepSpeed's BF16_Optimizer holds and copies fp32 gradients
    return buffers


def _gathered(strategy: Strategy, shapes: Transformer) -> int:
    """Return how many parameters ZeRO-3 holds whole at a time: at least those of one block."""
    block = sum(p.numel() for p in shapes.layers[0].parameters())
    return min(shapes.num_parameters(), max(strategy.reuse_distance // 2, block))


def _activations(strategy: Strategy, work: Workload) -> float:
    """Return the peak bytes of activations and logits of a micro-batch.
    These are the tensors that autograd saves (compiled code saves fewer) and temporary tensors: on
    a GPU those of one block or of the loss, whichever are larger, on a CPU the sum of both."""
    config, h = work.shapes.config, work.itemsize
    compiled = work.compiled and strategy.stage != 3
    # For a GPU the next line assumes that PyTorch has a fused attention kernel.
    keeps_scores = not config.use_flash_attn or (work.on_cpu and config.dropout > 0)
    # Bytes per token that autograd saves:
    per_channel = 2 * h if compiled else 8 + h  # of a norm; 8: fp32 input and normed x; h: output
    norm = per_channel * config.dim
    repeats = keeps_scores or (work.masked and not work.on_cpu)  # k and v for all heads
    n_keys = config.n_heads if repeats else config.n_kv_heads
    attention = 2 * h * (config.n_heads + n_keys) * config.head_dim  # q, output, k, v
    if config.qk_norm:
        attention += per_channel * (config.n_heads + config.n_kv_heads) * config.head_dim
    width, routed = config.hidden_dim, 0
    if config.use_moe:  # each of a token's experts has its own copy of input and output
        n_used = config.num_experts_per_tok + config.n_shared_experts
        width, routed = n_used * config.moe_hidden_dim, 2 * h * n_used * config.dim
    feed_forward = (3 if compiled else 4) * h * width + routed  # w1 x, w3 x, product; 4th: silu
    scores = 0.0
    if keeps_scores:  # softmax in fp32, a copy in 16 bits, masks of dropout
        scores = config.n_heads * config.max_seq_len * (12 if config.dropout else 6)
    elif work.on_cpu:  # blocks of 64 or more positions (model/cpu_attention.py)
        scores = config.n_heads * h * (config.max_seq_len + 64) / 2
    if config.dropout:  # masks after attention and feed-forward
        attention += 2 * h * config.dim
    block = 2 * norm + attention + scores + feed_forward
    kept = config.n_layers * block + norm  # with the final norm
    if work.args.gradient_checkpointing != "off":
        inputs = 4 if work.on_cpu else 1  # factor: on a CPU, freed gaps between inputs stay unused
        kept = inputs * config.n_layers * h * config.dim + block + norm
        if work.args.gradient_checkpointing == "selective" and not keeps_scores:
            kept += config.n_layers * (h * config.n_heads * config.head_dim + scores)
    # Bytes of all tokens of the micro-batch:
    tokens = work.args.batch_size * config.max_seq_len
    whole = 2 * work.trained * (strategy.stage is None and h == 2)  # autocast's copies of weights
    whole += tokens * config.max_seq_len * h * work.masked  # the mask, (B, 1, T, T)
    logits = tokens_at_once(config.vocab_size, tokens, work.device) * config.vocab_size
    logits *= 2 * h if compiled else 12  # with log-probabilities and gradients
    if work.teacher:  # logits of both models, a gradient, and copies of a chunk
        logits = tokens * config.vocab_size * (3 * h + 4) + 6 * 2**27
    squares = 20 * config.n_heads * config.max_seq_len if keeps_scores else 0  # five T × T in fp32
    at_work = tokens * (3 * h * width + 16 * config.dim + squares)  # in one block
    if work.on_cpu:  # gradients of a block do not reuse the freed memory of the logits
        return (tokens * kept + whole + logits + at_work) * CPU_KEEPS
    return tokens * kept + whole + max(logits, at_work)


def fits(strategy: Strategy, work: Workload, memory: int, ram: float = math.inf) -> bool:
    """Return whether a process needs at most `memory` bytes, including a margin on a GPU, and
    offloads at most `ram` bytes to RAM."""
    expected = estimate(strategy, work)
    working = expected.working * (1 if work.on_cpu else MARGIN)
    return expected.held + working + OVERHEAD <= memory and expected.ram <= ram


def can_coalesce(strategy: Strategy, work: Workload, memory: int) -> bool:
    """Return whether ZeRO-2 should reduce gradients once per step: whole gradients must fit too."""
    if strategy.stage != 2 or work.args.accumulation_steps == 1 or not work.args.coalesce_reduction:
        return False
    return fits(replace(strategy, coalesces=True), work, memory)


def largest_batch(strategy: Strategy, work: Workload, memory: int) -> int:
    """Return the largest --batch_size with which a process `fits` into `memory` bytes, or 0."""

    def is_too_large(size: int) -> bool:
        return not fits(strategy, replace(work, args=replace(work.args, batch_size=size)), memory)

    return bisect_right(range(1, LARGEST_BATCH + 1), False, key=is_too_large)
