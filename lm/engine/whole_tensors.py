"""Read and write whole weights and optimizer state by parameter name, under every engine.

DeepSpeed ZeRO divides the fp32 weights and the state of the optimizer: see `partitions`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lm.common.errors import UsageError
from lm.engine.engine import Engine
from lm.formats.portable import from_weights, require_fit
from model import Transformer
from model.lora import merged_weights


def state_of(optimizer: torch.optim.Optimizer, group: dict, tensor: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's state of a tensor; create zeros before the first step.
    The keys are exp_avg and exp_avg_sq for AdamW, and momentum_buffer for Muon."""
    state = optimizer.state[tensor]
    by_muon = group.get("algorithm") == "muon"
    keys = ("momentum_buffer",) if by_muon else ("exp_avg", "exp_avg_sq")
    if keys[0] not in state:
        if not by_muon:
            is_deepspeeds = type(optimizer).__module__.startswith("deepspeed.")
            state["step"] = 0 if is_deepspeeds else torch.zeros((), device=tensor.device)
        for key in keys:
            state[key] = torch.zeros_like(tensor)
    return {key: state[key] for key in keys}


def catch_up(optimizer, step: int) -> None:
    """Give DeepSpeed's CPU AdamW exactly the bias correction that it has after `step` steps.
    DeepSpeed multiplies powers of the betas in each step and has no setter: take empty steps."""
    group = optimizer.param_groups[0]
    betas, eps, correct = group["betas"], group["eps"], group["bias_correction"]
    settings = (0.0, *betas, eps, 0.0, correct)  # learning rate 0, weight decay 0
    nothing = torch.zeros(4, 1)  # one weight, its gradient, its moments
    for past in range(1, step + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, past, *settings, *nothing)


class TrainingState:
    """Weights and optimizer state of a model in training. `shapes` is the model on the meta device.
    Every process must call each method. `weights` and `moments` return {} except on rank 0."""

    def __init__(self, engine: Engine, model: nn.Module, optimizer, shapes: Transformer):
        self.engine, self.accelerator, self.shapes = engine, engine.accelerator, shapes
        self.model = getattr(model, "module", model)  # without the wrapper of DDP or DeepSpeed
        # `zero` is DeepSpeed's wrapper of `optimizer`. It divides the fp32 weights.
        self.zero = model.optimizer if engine.deepspeed is not None else None
        self.optimizer = self.zero.optimizer if self.zero else optimizer.optimizer

    def weights(self) -> dict[str, Tensor]:
        """Return the fp32 weights of the trained parameters by name."""
        return self._whole(moments=False)

    def moments(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors, with names such as "norm.weight.exp_avg"."""
        return self._whole(moments=True)

    def whole_model(self) -> Transformer | None:
        """Return the model; under ZeRO-3 a copy on the main process's CPU, None elsewhere."""
        if not self.engine.divides_model:
            return self.model
        weights = self.weights()
        for name, parameter in self._frozen():
            with gathered(parameter):
                if self.accelerator.is_main_process:
                    weights[name] = parameter.data.to("cpu", torch.float32, copy=True)
        if not self.accelerator.is_main_process:
            return None
        weights = merged_weights(weights, self.model.lora)
        with torch.random.fork_rng(devices=[]):  # keep the run's random state
            return from_weights(self.model.config, weights, "the model in training")

    def scalars(self) -> dict:
        """Return AdamW's step (0 if Muon updates everything), the state of fp16's loss scale and
        whether Muon gives the rows of an update equal norms (None without Muon)."""
        scale = None
        if self.accelerator.mixed_precision == "fp16" and self.zero:
            scaler = vars(self.zero.loss_scaler)
            scale = {k: v for k, v in scaler.items() if isinstance(v, bool | int | float)}
        elif self.accelerator.mixed_precision == "fp16":
            scale = self.accelerator.scaler.state_dict()
        steps = (state["step"] for state in self.optimizer.state.values() if "step" in state)
        rows = self.optimizer.param_groups[0].get("equal_rows")
        return {"optimizer_step": int(next(steps, 0)), "loss_scale": scale, "equal_rows": rows}

    def load(self, weights: dict, moments: dict, scalars: dict, source: str) -> None:
        """Restore the values that `weights`, `moments` and `scalars` return, and frozen weights.
        Raises UsageError if weights or shapes do not fit, KeyError if a moment is missing."""
        self.load_weights(weights, source)
        for key, parameter, inside, part in self._shards(moments=True, writes=True):
            if moments[key].shape != shape_of(parameter):
                raise UsageError(f"{source}: the shape of {key} is not that of its parameter")
            part.copy_(moments[key].view(-1)[inside])
        step = scalars["optimizer_step"]
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] += step - int(state["step"])  # a tensor, or DeepSpeed's int
        if hasattr(self.optimizer, "ds_opt_adam"):
            catch_up(self.optimizer, step)
        if "equal_rows" in (group := self.optimizer.param_groups[0]):
            group["equal_rows"] = scalars["equal_rows"]
        scale = scalars["loss_scale"] if self.accelerator.mixed_precision == "fp16" else None
        if scale and self.zero:
            vars(self.zero.loss_scaler).update(scale)
        elif scale:
            self.accelerator.scaler.load_state_dict(scale)

    def load_weights(self, weights: dict, source: str) -> None:
        """Restore fp32 weights, trained and frozen. The weights of adapters may be missing.
        Raises UsageError if names or shapes do not fit the model."""
        require_fit(self.shapes, weights, source)
        if self.engine.divides_model:  # the parameters of self.model are empty
            for name, parameter in self._frozen():
                with gathered(parameter, writes=True):
                    parameter.data.copy_(weights[name])
        else:
            self.model.load_state_dict(weights, strict=False)
        for name, _, inside, part in self._shards(moments=False, writes=True):
            if name in weights:
                part.copy_(weights[name].view(-1)[inside])

    def _frozen(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if not p.requires_grad]

    def _whole(self, moments: bool) -> dict[str, Tensor]:
        """Return whole tensors, joined from the shards of all processes."""
        whole = {}
        for key, parameter, inside, part in self._shards(moments):
            shape = shape_of(parameter)
            if self.zero:
                joined = torch.zeros(shape.numel(), device=self.accelerator.device)
                joined[inside] = part
                if self.accelerator.num_processes > 1:
                    torch.distributed.all_reduce(joined)
                part = joined
            if self.accelerator.is_main_process:
                whole[key] = part.detach().view(shape).to("cpu", torch.float32, copy=True)
        return whole

    def _shards(self, moments: bool, writes: bool = False) -> Iterator[tuple]:
        """Yield (name, parameter, slice, view) of the weights or moments of this process.
        The slice gives the elements of the flat parameter that this process holds. The view shares
        memory with the optimizer's tensor. The order is the same on all processes."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        rank = self.accelerator.process_index
        for partition in partitions(self.zero or self.optimizer, rank, writes):
            tensors = {"": partition.fp32.data}
            if moments:
                group = self.optimizer.param_groups[partition.group]
                kept = state_of(self.optimizer, group, partition.fp32)
                tensors = {f".{key}": tensor for key, tensor in kept.items()}
            for part in partition.parts:
                for key, tensor in tensors.items():
                    name, view = names[id(part.parameter)] + key, tensor.view(-1)
                    yield name, part.parameter, part.in_parameter, view[part.in_partition]


class Part(NamedTuple):
    """The elements of one parameter that this process holds, possibly none."""

    parameter: nn.Parameter
    in_parameter: slice  # place of these elements in the flattened parameter
    in_partition: slice  # place of these elements in this process's partition
    split: bool  # whether the parameter lies on more than one process


class Partition(NamedTuple):
    """Weights of one parameter group that the optimizer of this process updates."""

    fp32: Tensor  # (numel,), or a parameter
    parts: list[Part]  # one for each parameter, in the same order on every process
    group: int  # index in the optimizer's `param_groups`


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the whole parameter; under ZeRO-3 `parameter.shape` may be (0,)."""
    return getattr(parameter, "ds_shape", parameter.shape)


def gathered(*parameters: nn.Parameter, writes: bool = False) -> AbstractContextManager:
    """Return a context in which the parameters are whole. Every process must enter the context.
    With `writes`, all processes get the values that rank 0 wrote in the context."""
    import deepspeed  # importing it takes seconds

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if writes else None)


def partitions(optimizer, rank: int, writes: bool = False) -> Iterator[Partition]:
    """Yield the partitions that this process updates: those of DeepSpeed's wrapper of an optimizer,
    or the whole parameters of PyTorch's optimizer. A partition on NVMe is in memory until the next
    partition is requested. Set `writes` to change partitions: under ZeRO-3 the new values are
    copied to the model, under ZeRO-1 and 2 they are not."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from _of_zero_3(optimizer, rank, writes)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        yield from _of_zero_1_and_2(optimizer, rank)
    else:
        for index, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                yield Partition(p, [Part(p, slice(None), slice(None), split=False)], index)


def _of_zero_1_and_2(zero, rank: int) -> Iterator[Partition]:
    """Yield one partition for each parameter group.
    The flat parameters of a group form one long vector, and every process has an equal part of it.
    DeepSpeed's own table, `_hp_mapping`, is wrong with "round_robin_gradients"."""
    if hasattr(zero, "single_partition_of_fp32_groups"):
        partitions_fp32 = zero.single_partition_of_fp32_groups
        groups = zero.round_robin_bit16_groups
        offsets = zero.round_robin_bit16_offsets
    else:  # BF16_Optimizer (ZeRO-1 in bf16 with fp32 gradients) has other names
        partitions_fp32 = zero.fp32_groups_flat_partition
        groups = zero.bf16_groups
        offsets = [accumulate((p.numel() for p in group[:-1]), initial=0) for group in groups]
    layout = zip(partitions_fp32, groups, offsets, strict=True)
    for index, (fp32, group, group_offsets) in enumerate(layout):
        size = fp32.numel()  # the same on every process
        here = rank * size  # where this process's partition begins in the vector
        parts = []
        for parameter, first in zip(group, group_offsets, strict=True):
            behind = first + parameter.numel()
            start = max(first, here)
            end = max(start, min(behind, here + size))  # equals start if no element is here
            in_parameter = slice(start - first, end - first)
            in_partition = slice(start - here, end - here)
            split = first // size != (behind - 1) // size
            parts.append(Part(parameter, in_parameter, in_partition, split))
        yield Partition(fp32, parts, index)


def _of_zero_3(zero, rank: int, writes: bool) -> Iterator[Partition]:
    """Yield one partition for each of DeepSpeed's sub-groups, which ends after about
    "sub_group_size" elements. All shares of a parameter are equally large, some with padding."""
    if writes:
        zero._partition_all_parameters()  # some parameters may be gathered now
    for index, group in enumerate(zero.fp16_groups):
        on_nvme = zero._swappable_optimizer_subgroup(index)
        if on_nvme:
            zero._optimizer_states_and_gradient_swap_in(index)
        parts = []
        here = 0  # where the share of the next parameter begins in the partition
        for parameter in group:
            share = parameter.partition_numel()  # with padding
            numel = shape_of(parameter).numel()
            start = min(rank * share, numel)
            held = min(share, numel - start)  # without padding
            in_parameter = slice(start, start + held)
            in_partition = slice(here, here + held)
            parts.append(Part(parameter, in_parameter, in_partition, share < numel))
            here += share
        fp32 = zero.fp32_partitioned_groups_flat[index]
        yield Partition(fp32, parts, zero.sub_group_to_group_id[index])
        if writes:  # copy the values to the model, as DeepSpeed's own step does
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if on_nvme and writes:
            zero._optimizer_states_and_gradient_swap_out(index)
        elif on_nvme:
            zero._release_swap_buffers(index)
