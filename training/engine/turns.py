"""Several models in one process, one after the other: what there is once, and is each one's own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from training.engine.launch import Engine


class Turn:
    """One model's part of the process: the numbers that dropout and initial weights are drawn from,
    DeepSpeed's configuration in Accelerate's state, and the `linear` that ZeRO-3 puts in the place
    of PyTorch's. Each model then computes what it does alone."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._device = engine.accelerator.device
        self._linear = functional.linear
        self._random: dict[str, Tensor] | None = None  # as it is when its first turn begins

    @contextmanager
    def taken(self) -> Iterator[None]:
        """In here the model is built, trained or saved, and no other one."""
        state, plugin = self._engine.accelerator.state, self._engine.plugin
        if plugin is not None and not state.get_deepspeed_plugin(plugin).selected:
            state.select_deepspeed_plugin(plugin)
        others, functional.linear = functional.linear, self._linear
        if self._random is not None:
            self._put_random(self._random)
        try:
            yield
        finally:
            self._random = self._take_random()
            self._linear, functional.linear = functional.linear, others

    def _take_random(self) -> dict[str, Tensor]:
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        return random

    def _put_random(self, random: dict[str, Tensor]) -> None:
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self._device)
