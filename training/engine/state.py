"""Weights and optimizer state, whole and by parameter name, under every engine."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from formats.portable import load_weights, require_fit
from model import Transformer
from model.config import ConfigError
from model.lora import add_lora, merged_weights
from training.engine.launch import Engine, plain_module
from training.engine.partition import gathered, partitions, shape_of

MUON_STATE = ("momentum_buffer",)
ADAMW_STATE = ("exp_avg", "exp_avg_sq")


def state_keys(group: dict) -> tuple[str, ...]:
    """Return the names of the tensors that the optimizer keeps for a parameter of this group."""
    return MUON_STATE if group.get("algorithm") == "muon" else ADAMW_STATE


def state_of(optimizer: torch.optim.Optimizer, group: dict, stepped: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's state of a tensor; it is made if there has been no step yet."""
    state = optimizer.state[stepped]
    keys = state_keys(group)
    if keys[0] not in state:
        if keys == ADAMW_STATE:
            state["step"] = torch.zeros((), dtype=torch.float32, device=stepped.device)
            if type(optimizer).__module__.startswith("deepspeed."):  # it counts in an int
                state["step"] = 0
        for key in keys:
            state[key] = torch.zeros_like(stepped)
    return state


def catch_up(optimizer, step: int) -> None:
    """Take empty steps with DeepSpeed's AdamW for the CPU, so that its bias correction goes on to
    the bit: it multiplies the powers of the betas up, and has no way to set them."""
    group, nothing = optimizer.param_groups[0], torch.zeros(4, 1)
    for past in range(1, step + 1):
        optimizer.ds_opt_adam.adam_update(
            *(optimizer.opt_id, past, 0.0, *group["betas"], group["eps"], 0.0),
            *(group["bias_correction"], *nothing),
        )


class Shard(NamedTuple):
    """The part of a parameter that this process holds: all of it without ZeRO, possibly none."""

    inside: slice  # of the flattened parameter
    fp32: Tensor  # a flat view into the optimizer's own memory
    moments: dict[str, Tensor]  # likewise


class TrainingState:
    """Reads and writes what the optimizer works on, parameter by parameter, under DeepSpeed ZeRO,
    DDP or no engine, wherever it is offloaded to.

    All methods but those that load are collective: every process must call them, and what they
    return is on the main process's CPU and empty elsewhere.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer):
        self.accelerator = engine.accelerator
        self.divides_model = engine.divides_model
        self.model = plain_module(model)
        self.zero = model.optimizer if engine.deepspeed is not None else None
        self.optimizer = self.zero.optimizer if self.zero else optimizer.optimizer

    def weights(self) -> dict[str, Tensor]:
        """Return name → fp32 weights of what is trained."""
        whole = {}
        for name, parameter, held in self._shards():
            whole |= self._join(name, parameter, held.inside, held.fp32)
        return whole

    def moments(self) -> dict[str, Tensor]:
        """Return name.exp_avg, name.exp_avg_sq (AdamW's) or name.momentum_buffer (Muon's)."""
        whole = {}
        for name, parameter, held in self._shards():
            for key, part in held.moments.items():
                whole |= self._join(f"{name}.{key}", parameter, held.inside, part)
        return whole

    def whole_model(self) -> Transformer | None:
        """Return a model that has all weights: the model itself where the engine leaves it whole,
        or else a copy on the main process's CPU and None elsewhere."""
        if not self.divides_model:
            return self.model
        weights = self.weights()
        for name, parameter in self._frozen():
            with gathered(parameter):
                if self.accelerator.is_main_process:
                    weights[name] = parameter.data.to("cpu", torch.float32, copy=True)
        if not self.accelerator.is_main_process:
            return None
        weights = merged_weights(weights, self.model.lora)
        with torch.random.fork_rng(devices=[]):  # of which dropout draws
            model = Transformer(self.model.config)
        load_weights(model, weights, "the model in training")
        return model.eval()

    def scalars(self) -> dict:
        """Return AdamW's step, for its bias correction (0 where Muon steps all), and fp16's loss
        scale."""
        scale = None
        if self.accelerator.mixed_precision == "fp16" and self.zero:
            scaler = vars(self.zero.loss_scaler)
            scale = {k: v for k, v in scaler.items() if isinstance(v, bool | int | float)}
        elif self.accelerator.mixed_precision == "fp16":
            scale = self.accelerator.scaler.state_dict()
        steps = (state["step"] for state in self.optimizer.state.values() if "step" in state)
        return {"optimizer_step": int(next(steps, 0)), "loss_scale": scale}

    def load(self, weights: dict, moments: dict, scalars: dict, source: str) -> None:
        """Put everything back, frozen weights too; all processes call this.

        Raises ConfigError: names or shapes that do not fit the model.
        """
        self.load_weights(weights, source)
        for name, parameter, held in self._shards(writes=True):
            for key, part in held.moments.items():
                moment = moments[f"{name}.{key}"]
                if moment.shape != shape_of(parameter):
                    raise ConfigError(f"{source}: {name}.{key} has another shape than {name}")
                part.copy_(moment.view(-1)[held.inside])
        step = scalars["optimizer_step"]
        for state in self.optimizer.state.values():
            if "step" in state:
                is_tensor = isinstance(state["step"], Tensor)
                state["step"] = state["step"].fill_(step) if is_tensor else step
        if hasattr(self.optimizer, "ds_opt_adam"):
            catch_up(self.optimizer, step)
        scale = scalars["loss_scale"] if self.accelerator.mixed_precision == "fp16" else None
        if scale and self.zero:
            vars(self.zero.loss_scaler).update(scale)
        elif scale:
            self.accelerator.scaler.load_state_dict(scale)

    def load_weights(self, weights: dict, source: str) -> None:
        """Put the fp32 weights back and leave the optimizer, and adapters that are not among them,
        as they are; all processes call this.

        Raises ConfigError: names or shapes that do not fit the model.
        """
        if self.divides_model:  # its own parameters are empty
            with torch.device("meta"):
                shapes = Transformer(self.model.config)
                if self.model.lora:
                    add_lora(shapes, **vars(self.model.lora))
            require_fit(shapes, weights, source)
            for name, parameter in self._frozen():
                with gathered(parameter, writes=True):
                    parameter.data.copy_(weights[name])
        else:
            load_weights(self.model, weights, source)
        for name, _, held in self._shards(writes=True):
            if name in weights:
                held.fp32.copy_(weights[name].view(-1)[held.inside])

    def _frozen(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if not p.requires_grad]

    def _shards(self, writes: bool = False) -> Iterator[tuple[str, Tensor, Shard]]:
        """Yield (name, parameter, what this process holds of it), in one order on all processes;
        `writes` as in `partitions`."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        if not self.zero:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    moments = {k: v.view(-1) for k, v in self._moments_of(p, group).items()}
                    yield names[id(p)], p, Shard(slice(None), p.data.view(-1), moments)
            return
        for partition in partitions(self.zero, self.accelerator.process_index, writes):
            group = self.optimizer.param_groups[partition.group]
            moments = self._moments_of(partition.fp32, group)
            for part in partition.parts:
                here = part.in_partition
                parts = {key: moment[here] for key, moment in moments.items()}
                held = Shard(part.in_parameter, partition.fp32.data[here], parts)
                yield names[id(part.parameter)], part.parameter, held

    def _moments_of(self, stepped: Tensor, group: dict) -> dict[str, Tensor]:
        state = state_of(self.optimizer, group, stepped)
        return {key: state[key] for key in state_keys(group)}

    def _join(self, name: str, parameter: Tensor, inside: slice, part: Tensor) -> dict[str, Tensor]:
        """Return {name: whole tensor} on the main process, joined from every process's part."""
        whole = part
        if self.zero:
            whole = torch.zeros(shape_of(parameter).numel(), device=self.accelerator.device)
            whole[inside] = part
            if self.accelerator.num_processes > 1:
                torch.distributed.all_reduce(whole)
        if not self.accelerator.is_main_process:
            return {}
        whole = whole.detach().view(shape_of(parameter))
        return {name: whole.to("cpu", torch.float32, copy=True)}
