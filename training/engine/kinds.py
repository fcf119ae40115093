"""The engines that one can choose from: what each divides among the processes, and where it keeps
it.

In the order of the advice: no ZeRO where DDP fits, ZeRO-2 before ZeRO-3, offload last.
"""

from dataclasses import dataclass

GPU, CPU, NVME = "gpu", "cpu", "nvme"


@dataclass(frozen=True)
class Kind:
    """One of them, with the numbers of its DeepSpeed file that memory and traffic depend on."""

    config: str  # its file, configs/NAME.yaml
    name: str  # for people
    stage: int | None = None  # of ZeRO; None is DDP, or a single process without engine
    optimizer_on: str = GPU
    parameters_on: str = GPU
    # Elements.
    reduce_bucket: int = 50_000_000  # gradients that are exchanged at once
    reuse_distance: int = 10**9  # ZeRO-3: weights that are used again so soon are not let go of
    persistence: int | None = None  # ZeRO-3: parameters up to this size are never let go of;
    # None is "auto", 10 times the model's width

    @property
    def offloads(self) -> bool:
        return self.optimizer_on != GPU or self.parameters_on != GPU


DDP = Kind("ddp", "DDP")
ENGINES = (
    DDP,
    Kind("zero1", "ZeRO-1", 1),
    Kind("zero2", "ZeRO-2", 2),
    Kind("zero3", "ZeRO-3", 3),
    Kind("zero2_offload", "ZeRO-2, optimizer on the CPU", 2, CPU),
    Kind("zero3_offload", "ZeRO-3, all on the CPU", 3, CPU, CPU),
    Kind("zero_infinity", "ZeRO-Infinity, all on NVMe", 3, NVME, NVME),
)


def kind_of(zero: dict | None) -> Kind:
    """The engine of a "zero_optimization" section; DDP of None."""
    if zero is None:
        return DDP
    on = [
        {"none": GPU}.get(place, place)
        for part in ("optimizer", "param")
        for place in [(zero.get(f"offload_{part}") or {}).get("device", "none")]
    ]
    known = {
        "reduce_bucket": zero.get("reduce_bucket_size"),
        "reuse_distance": zero.get("stage3_max_reuse_distance"),
        "persistence": zero.get("stage3_param_persistence_threshold"),
    }
    numbers = {name: int(value) for name, value in known.items() if value not in (None, "auto")}
    like = [each for each in ENGINES if [each.optimizer_on, each.parameters_on] == on]
    near = next((each for each in like if each.stage == zero["stage"]), None)
    name = near.name if near else f"ZeRO-{zero['stage']}"
    return Kind(near.config if near else "", name, zero["stage"], *on, **numbers)
