"""Checkpoints: all that the next step depends on, by parameter name, in fp32, in files that cannot
execute.

A checkpoint is a folder checkpoints/step-N:

    weights.safetensors    name → fp32 weights (the master weights under DeepSpeed)
    optimizer.safetensors  name.exp_avg and name.exp_avg_sq → AdamW's averages
    rng-RANK.safetensors   state of that process's random generators
    state.json             step, samples consumed, the optimizer's step, loss scale

Nothing in it depends on the engine or the number of processes: what ZeRO has divided is put
together parameter by parameter. The folder is written under another name and renamed when it is
complete.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import ConfigError
from model.portable import load_weights
from training.errors import UsageError

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
AVERAGES = ("exp_avg", "exp_avg_sq")


@dataclass
class Slice:
    """The part of one parameter that this process holds in fp32, and the averages of that part.

    `fp32` and `averages` are flat views into the optimizer's own memory; `start` is where they
    begin in the flattened parameter. Without ZeRO every process holds the whole.
    """

    parameter: Tensor
    start: int
    fp32: Tensor
    averages: dict[str, Tensor]


def _names(accelerator, model) -> dict[int, str]:
    return {id(p): name for name, p in accelerator.unwrap_model(model).named_parameters()}


def _torch_optimizer(accelerator, model, optimizer) -> torch.optim.Optimizer:
    return model.optimizer.optimizer if _is_zero(accelerator) else optimizer.optimizer


def _is_zero(accelerator) -> bool:
    return accelerator.state.deepspeed_plugin is not None


def _averages(torch_optimizer, held: Tensor) -> dict[str, Tensor]:
    """AdamW's averages for a tensor it steps, made now if it has not stepped yet."""
    state = torch_optimizer.state[held]
    if "exp_avg" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=held.device)
        for key in AVERAGES:
            state[key] = torch.zeros_like(held)
    return {key: state[key] for key in AVERAGES}


def _slices(accelerator, model, optimizer) -> Iterator[tuple[str, Tensor, Slice | None]]:
    """(name, parameter, what this process holds of it), in the same order on every process."""
    names = _names(accelerator, model)
    torch_optimizer = _torch_optimizer(accelerator, model, optimizer)
    if not _is_zero(accelerator):
        for group in torch_optimizer.param_groups:
            for p in group["params"]:
                averages = {k: v.view(-1) for k, v in _averages(torch_optimizer, p).items()}
                yield names[id(p)], p, Slice(p, 0, p.data.view(-1), averages)
        return
    # ZeRO-1 and 2 lay the parameters of a group end to end and give every process an equal stretch
    # of that line. In bf16 with fp32 gradients ZeRO-1 is another class, with other names for both.
    zero = model.optimizer
    if hasattr(zero, "single_partition_of_fp32_groups"):
        stretches, groups = zero.single_partition_of_fp32_groups, zero.bit16_groups
    else:
        stretches, groups = zero.fp32_groups_flat_partition, zero.bf16_groups
    for flat, parameters in zip(stretches, groups, strict=True):
        averages = _averages(torch_optimizer, flat)
        for p in parameters:
            held = None
            if (mapping := p._hp_mapping) is not None:
                whole, part = mapping.lp_fragment_address, mapping.hp_fragment_address
                here = slice(part.start, part.start + part.numel)
                held = Slice(
                    p, whole.start, flat.data[here], {k: v[here] for k, v in averages.items()}
                )
            yield names[id(p)], p, held


def _whole(accelerator, parameter: Tensor, held: Slice | None, part: Tensor | None) -> Tensor:
    """A parameter-shaped fp32 tensor put together from every process's part."""
    if not _is_zero(accelerator):
        return part.view_as(parameter)
    full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if held is not None:
        full[held.start : held.start + part.numel()] = part
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(full)
    return full.view_as(parameter)


def fp32_weights(accelerator, model, optimizer) -> dict[str, Tensor]:
    """The fp32 weights by name, on the main process's CPU; empty elsewhere. A collective call."""
    weights = {}
    for name, parameter, held in _slices(accelerator, model, optimizer):
        whole = _whole(accelerator, parameter, held, held and held.fp32)
        if accelerator.is_main_process:
            weights[name] = whole.detach().to("cpu", torch.float32, copy=True)
    return weights


def save_checkpoint(path: Path, accelerator, model, optimizer, progress: dict) -> None:
    """Write a checkpoint. Every process must call it.

    Args:
        path: the folder to make; one of that name from before is replaced.
        progress: JSON values to find again when resuming, such as step and samples.

    Raises:
        OSError: on the process that could not write.
    """
    partial = path.with_name(path.name + ".partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    weights = fp32_weights(accelerator, model, optimizer)
    averages = {}
    for name, parameter, held in _slices(accelerator, model, optimizer):
        for key in AVERAGES:
            whole = _whole(accelerator, parameter, held, held and held.averages[key])
            if accelerator.is_main_process:
                averages[f"{name}.{key}"] = whole.detach().to("cpu", copy=True)
    if accelerator.is_main_process:
        save_file(weights, partial / WEIGHTS)
        save_file(averages, partial / OPTIMIZER)
        torch_optimizer = _torch_optimizer(accelerator, model, optimizer)
        state = progress | {
            "optimizer_step": int(next(iter(torch_optimizer.state.values()))["step"]),
            "loss_scale": _loss_scaler(accelerator, model),
            "processes": accelerator.num_processes,
        }
        (partial / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    save_file(_rng_state(accelerator.device), partial / _rng_file(accelerator))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    accelerator.wait_for_everyone()


def load_checkpoint(path: Path, accelerator, model, optimizer) -> dict:
    """Put a checkpoint into the prepared model and optimizer, on every process.

    Returns:
        The `progress` that was saved.

    Raises:
        UsageError: files missing or damaged, or of a model of another shape.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        weights, averages = load_file(path / WEIGHTS), load_file(path / OPTIMIZER)
        load_weights(accelerator.unwrap_model(model), weights, str(path / WEIGHTS))
        for name, parameter, held in _slices(accelerator, model, optimizer):
            if held is None:
                continue
            end = held.start + held.fp32.numel()
            held.fp32.copy_(weights[name].view(-1)[held.start : end])
            for key in AVERAGES:
                whole = averages[f"{name}.{key}"]
                if whole.shape != parameter.shape:
                    raise UsageError(
                        f"{path / OPTIMIZER}: {name}.{key} has shape {tuple(whole.shape)}"
                    )
                held.averages[key].copy_(whole.view(-1)[held.start : end])
        for tensors in _torch_optimizer(accelerator, model, optimizer).state.values():
            tensors["step"].fill_(state["optimizer_step"])
        _set_loss_scaler(accelerator, model, state["loss_scale"])
        _restore_rng(path, accelerator)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, ConfigError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"checkpoint {path} cannot be used: {type(error).__name__}: {error}"
        ) from error
    return state


def _loss_scaler(accelerator, model) -> dict | None:
    """fp16's loss scaling; None in other precisions."""
    if accelerator.mixed_precision != "fp16":
        return None
    if _is_zero(accelerator):
        return {
            k: v
            for k, v in vars(model.optimizer.loss_scaler).items()
            if isinstance(v, bool | int | float)
        }
    return accelerator.scaler.state_dict()


def _set_loss_scaler(accelerator, model, values: dict | None) -> None:
    if values is None or accelerator.mixed_precision != "fp16":
        return
    if _is_zero(accelerator):
        vars(model.optimizer.loss_scaler).update(values)
    else:
        accelerator.scaler.load_state_dict(values)


def _rng_file(accelerator) -> str:
    return f"rng-{accelerator.process_index:05d}.safetensors"


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_rng(path: Path, accelerator) -> None:
    file = path / _rng_file(accelerator)
    if not file.exists():
        print(
            f"rank {accelerator.process_index}: {path} has no random state for it, "
            "dropout takes other masks"
        )
        return
    state = load_file(file)
    torch.set_rng_state(state["cpu"])
    if accelerator.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], accelerator.device)
