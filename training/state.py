"""Weights and optimizer state, whole and by parameter name, however the engine has divided them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from model.config import ConfigError
from model.portable import load_weights
from training.muon import state_keys, state_of
from training.partition import stretches


@dataclass
class Slice:
    """The part of one parameter that this process holds in fp32, and the averages of that part.

    `fp32` and `averages` are flat views into the optimizer's own memory, empty if it holds nothing;
    `inside` is where they are in the flattened parameter. Without ZeRO every process holds the
    whole.
    """

    inside: slice
    fp32: Tensor
    averages: dict[str, Tensor]  # of gradients; which ones depends on who steps the parameter


class TrainingState:
    """Reads and writes what the optimizer works on, under DeepSpeed ZeRO-1 and 2, DDP or no engine.

    All methods but those that load are collective: every process must call them, and what they
    return is on the main process's CPU and empty elsewhere.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer):
        self.accelerator, self.model = accelerator, model
        self.zero = model.optimizer if accelerator.state.deepspeed_plugin is not None else None
        self.optimizer = self.zero.optimizer if self.zero else optimizer.optimizer

    def weights(self) -> dict[str, Tensor]:
        """name → fp32 weights."""
        whole = {}
        for name, parameter, held in self._slices():
            whole |= self._on_main(name, parameter, held.inside, held.fp32)
        return whole

    def averages(self) -> dict[str, Tensor]:
        """name.exp_avg and name.exp_avg_sq → AdamW's averages, name.momentum_buffer → Muon's."""
        whole = {}
        for name, parameter, held in self._slices():
            for key, part in held.averages.items():
                whole |= self._on_main(f"{name}.{key}", parameter, held.inside, part)
        return whole

    def scalars(self) -> dict:
        """AdamW's step, which the correction of its bias depends on, and fp16's loss scale."""
        scale = None
        if self.accelerator.mixed_precision == "fp16":
            if self.zero:
                scaler = vars(self.zero.loss_scaler)
                scale = {k: v for k, v in scaler.items() if isinstance(v, bool | int | float)}
            else:
                scale = self.accelerator.scaler.state_dict()
        steps = (state["step"] for state in self.optimizer.state.values() if "step" in state)
        return {"optimizer_step": int(next(steps)), "loss_scale": scale}

    def load(self, weights: dict, averages: dict, scalars: dict, source: str) -> None:
        """Put all of it back, on every process.

        Raises:
            ConfigError: names or shapes that do not fit the model.
        """
        self.load_weights(weights, source)
        for name, parameter, held in self._slices():
            for key, part in held.averages.items():
                if averages[f"{name}.{key}"].shape != parameter.shape:
                    raise ConfigError(f"{source}: {name}.{key} has another shape than {name}")
                part.copy_(averages[f"{name}.{key}"].view(-1)[held.inside])
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(scalars["optimizer_step"])
        if scalars["loss_scale"] is not None and self.accelerator.mixed_precision == "fp16":
            if self.zero:
                vars(self.zero.loss_scaler).update(scalars["loss_scale"])
            else:
                self.accelerator.scaler.load_state_dict(scalars["loss_scale"])

    def load_weights(self, weights: dict, source: str) -> None:
        """Put the fp32 weights back, on every process, and leave the optimizer as it is.

        Raises:
            ConfigError: names or shapes that do not fit the model.
        """
        load_weights(self.accelerator.unwrap_model(self.model), weights, source)
        for name, _, held in self._slices():
            held.fp32.copy_(weights[name].view(-1)[held.inside])

    def _slices(self) -> Iterator[tuple[str, Tensor, Slice]]:
        """(name, parameter, what this process holds of it), in one order on every process."""
        model = self.accelerator.unwrap_model(self.model)
        names = {id(p): name for name, p in model.named_parameters()}
        if not self.zero:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    averages = {k: v.view(-1) for k, v in self._averages_of(p, group).items()}
                    yield names[id(p)], p, Slice(slice(None), p.data.view(-1), averages)
            return
        divided = stretches(self.zero, self.accelerator.process_index)
        for stretch, group in zip(divided, self.optimizer.param_groups, strict=False):
            averages = self._averages_of(stretch.fp32, group)
            for part in stretch.parts:
                here = part.inside_stretch
                parts = {key: average[here] for key, average in averages.items()}
                held = Slice(part.inside_parameter, stretch.fp32.data[here], parts)
                yield names[id(part.parameter)], part.parameter, held

    def _averages_of(self, stepped: Tensor, group: dict) -> dict[str, Tensor]:
        state = state_of(self.optimizer, group, stepped)
        return {key: state[key] for key in state_keys(group)}

    def _on_main(
        self, name: str, parameter: Tensor, inside: slice, part: Tensor
    ) -> dict[str, Tensor]:
        """{name: the whole tensor} on the main process, put together from everybody's part."""
        if self.zero:
            whole = torch.zeros(parameter.numel(), device=parameter.device)
            whole[inside] = part
            if self.accelerator.num_processes > 1:
                torch.distributed.all_reduce(whole)
        else:
            whole = part
        if not self.accelerator.is_main_process:
            return {}
        return {name: whole.detach().view_as(parameter).to("cpu", torch.float32, copy=True)}
