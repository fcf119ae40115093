"""What the processes of a run share: DDP, or DeepSpeed's ZeRO with its stage and offload."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lm.engine.deepspeed_config import offload_device, read_config, section_of

GPU, CPU, NVME = "gpu", "cpu", "nvme"  # where tensors can be
# Engines in the order in which to try them: NAME of configs/NAME.yaml → DeepSpeed file.
NAMES = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero_infinity")
FILES = {name: f"configs/{name}.json" for name in NAMES} | {"zero2": "ds_config.json"}


@dataclass(frozen=True)
class Strategy:
    """The settings of an engine that decide memory and bytes sent. Sizes count elements."""

    config: str = ""  # NAME of configs/NAME.yaml, or "" if unknown
    stage: int | None = None  # ZeRO's stage; None for DDP and for a single process
    optimizer_on: str = GPU  # GPU, CPU or NVME
    parameters_on: str = GPU  # GPU; at stage 3 also CPU or NVME
    fp32_sums: bool = True  # True if gradients are summed in fp32
    reduce_bucket: int = 500_000_000  # elements of gradients that are exchanged at once
    reuse_distance: int = 10**9  # ZeRO-3 keeps weights used again within so many elements
    coalesces: bool = False  # ZeRO-2 keeps whole gradients and reduces them once per step

    @property
    def name(self) -> str:
        """The name in tables and messages, such as "ZeRO-3, optimizer on the CPU"."""
        if self.stage is None:
            return "DDP"
        places = {"optimizer": self.optimizer_on, "parameters": self.parameters_on}
        if self.optimizer_on == self.parameters_on:
            places = {"all": self.optimizer_on}
        where = {CPU: "the CPU", NVME: "NVMe"}
        said = [f", {what} on {where[on]}" for what, on in places.items() if on != GPU]
        return f"ZeRO-{self.stage}{''.join(said)}"

    @property
    def takes_muon(self) -> bool:
        """True if Muon can run: the optimizer is not offloaded, and the stage is not 3."""
        return self.stage != 3 and self.optimizer_on == GPU


DDP = Strategy("ddp")


def strategy_of(config: dict | None) -> Strategy:
    """Return the engine of a DeepSpeed configuration, or DDP if `config` is None."""
    if config is None:
        return DDP
    zero = config["zero_optimization"]
    sums = section_of(config, "data_types.").get("grad_accum_dtype")
    return Strategy(
        stage=zero["stage"],
        optimizer_on=offload_device(config, "optimizer") or GPU,
        parameters_on=offload_device(config, "param") or GPU,
        fp32_sums=sums in ("fp32", "float32"),
        reduce_bucket=int(zero.get("reduce_bucket_size", Strategy.reduce_bucket)),
        reuse_distance=int(zero.get("stage3_max_reuse_distance", Strategy.reuse_distance)),
    )


@cache
def strategies() -> tuple[Strategy, ...]:
    """Return DDP and the engines of FILES."""
    root = Path(__file__).parents[2]  # the repository
    found = ((name, read_config(str(root / file))) for name, file in FILES.items())
    return DDP, *(replace(strategy_of(config), config=name) for name, config in found)
