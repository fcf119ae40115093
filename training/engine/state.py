"""Weights and optimizer state, whole and by parameter name, under every engine."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from formats.portable import load_weights, require_fit
from model import Transformer
from model.config import ConfigError
from model.lora import add_lora, merged_weights
from training.engine.launch import Engine, plain_module
from training.engine.partition import gathered, partitions, shape_of


def state_of(optimizer: torch.optim.Optimizer, group: dict, stepped: Tensor) -> dict[str, Tensor]:
    """Return what the optimizer keeps of a tensor; zeros if there has been no step yet.

    That is exp_avg and exp_avg_sq for AdamW, momentum_buffer for Muon.
    """
    state, by_muon = optimizer.state[stepped], group.get("algorithm") == "muon"
    keys = ("momentum_buffer",) if by_muon else ("exp_avg", "exp_avg_sq")
    if keys[0] not in state:
        if not by_muon:
            counts_in_int = type(optimizer).__module__.startswith("deepspeed.")
            state["step"] = 0 if counts_in_int else torch.zeros((), device=stepped.device)
        for key in keys:
            state[key] = torch.zeros_like(stepped)
    return {key: state[key] for key in keys}


def catch_up(optimizer, step: int) -> None:
    """Take empty steps with DeepSpeed's AdamW for the CPU: its bias correction goes on to
    the bit. It multiplies the powers of the betas up, and cannot set them."""
    group, nothing = optimizer.param_groups[0], torch.zeros(4, 1)
    for past in range(1, step + 1):
        optimizer.ds_opt_adam.adam_update(
            *(optimizer.opt_id, past, 0.0, *group["betas"], group["eps"], 0.0),
            *(group["bias_correction"], *nothing),
        )


class TrainingState:
    """Reads and writes what the optimizer works on, under every engine.

    Every process must call the methods; what they return is on the main process's
    CPU, and empty elsewhere.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer):
        self.accelerator = engine.accelerator
        self.divides_model = engine.divides_model
        self.model = plain_module(model)
        self.zero = model.optimizer if engine.deepspeed is not None else None
        self.optimizer = self.zero.optimizer if self.zero else optimizer.optimizer

    def weights(self) -> dict[str, Tensor]:
        """Return name → fp32 weights of what is trained."""
        return self._whole(moments=False)

    def moments(self) -> dict[str, Tensor]:
        """Return the same for name.exp_avg and so on, see `state_of`."""
        return self._whole(moments=True)

    def whole_model(self) -> Transformer | None:
        """Return the model where the engine leaves it whole, or else a copy on the main
        process's CPU and None elsewhere."""
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
        with torch.random.fork_rng(devices=[]):
            model = Transformer(self.model.config)
        load_weights(model, weights, "the model in training")
        return model.eval()

    def scalars(self) -> dict:
        """Return AdamW's step (0 where Muon steps all), and fp16's loss scale."""
        scale = None
        if self.accelerator.mixed_precision == "fp16" and self.zero:
            scaler = vars(self.zero.loss_scaler)
            scale = {k: v for k, v in scaler.items() if isinstance(v, bool | int | float)}
        elif self.accelerator.mixed_precision == "fp16":
            scale = self.accelerator.scaler.state_dict()
        steps = (state["step"] for state in self.optimizer.state.values() if "step" in state)
        return {"optimizer_step": int(next(steps, 0)), "loss_scale": scale}

    def load(self, weights: dict, moments: dict, scalars: dict, source: str) -> None:
        """Put everything back, frozen weights too.
        Raises ConfigError: names or shapes that do not fit the model."""
        self.load_weights(weights, source)
        for key, parameter, inside, part in self._shards(moments=True, writes=True):
            if moments[key].shape != shape_of(parameter):
                raise ConfigError(f"{source}: {key} has another shape than its parameter")
            part.copy_(moments[key].view(-1)[inside])
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
        """Put the fp32 weights back; adapters may be missing among them.
        Raises ConfigError: names or shapes that do not fit the model."""
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
        for name, _, inside, part in self._shards(moments=False, writes=True):
            if name in weights:
                part.copy_(weights[name].view(-1)[inside])

    def _frozen(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if not p.requires_grad]

    def _whole(self, moments: bool) -> dict[str, Tensor]:
        """Return tensors joined from every process's part."""
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
        """Yield (name, parameter, slice that this process holds, flat view into the
        optimizer's memory) of weights or moments, in one order on all processes."""
        names = {id(p): name for name, p in self.model.named_parameters()}

        def flat(group: dict, stepped: Tensor) -> dict[str, Tensor]:
            kept = state_of(self.optimizer, group, stepped) if moments else {"": stepped.data}
            return {f".{key}" if key else "": tensor.view(-1) for key, tensor in kept.items()}

        groups = self.optimizer.param_groups
        if not self.zero:
            for each, p in ((group, p) for group in groups for p in group["params"]):
                for key, tensor in flat(each, p).items():
                    yield names[id(p)] + key, p, slice(None), tensor
            return
        for partition in partitions(self.zero, self.accelerator.process_index, writes):
            tensors = flat(groups[partition.group], partition.fp32)
            for part in partition.parts:
                for key, tensor in tensors.items():
                    name = names[id(part.parameter)] + key
                    yield name, part.parameter, part.in_parameter, tensor[part.in_partition]
