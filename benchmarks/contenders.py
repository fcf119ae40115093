"""Who takes part: names, what stands in a contender's way, how its processes are started."""

import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.machine import compiler_obstacle
from benchmarks.ours import can_compile
from benchmarks.peers import PEERS
from benchmarks.work import Work
from common.cpu import available_cores
from common.errors import UsageError
from training.engine.memory import GIB, activation_bytes, model_state_bytes

REPOSITORY = Path(__file__).resolve().parent.parent
ALLOCATORS = ("both", "default", "ours")
ZERO_STAGES = {"zero1": 1, "zero2": 2}
BARE_PROCESS_BYTES = GIB  # Python, PyTorch and its libraries; on a GPU the CUDA context
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    The engine "alone" is as many processes as the other engines have, each with its share of the
    machine, that know nothing of each other: what the others would reach if they exchanged nothing.
    `allocator` is "default" where the C library's settings are those of the contender's users, and
    "ours" for a peer that is given the training script's settings.
    """

    family: str  # "ours" or a key of PEERS
    compiled: bool
    engine: str = "single"  # of ours: single, ddp, zero1, zero2, alone
    allocator: str = "default"
    processes: int = 1

    @property
    def is_ours(self) -> bool:
        return self.family == "ours"

    @property
    def name(self) -> str:
        parts = [self.family, self.engine, "compiled" if self.compiled else "eager"]
        if self.engine == "single":
            del parts[1]
        return "-".join(parts) + ("+allocator" if self.allocator == "ours" else "")

    @property
    def tags(self) -> set[str]:
        """Every word of --contenders that means this one."""
        mode = "compiled" if self.compiled else "eager"
        group = "ours" if self.is_ours else "peers"
        return {"all", self.name, group, self.family, self.engine, mode}

    def build_command(self, work: Work, our_flags: str) -> dict:
        """What a worker is told first."""
        options = {"compiled": self.compiled}
        if self.is_ours:
            options["flags"] = our_flags
        else:
            options |= {"peer": self.family, "allocator": self.allocator}
        kind = "ours" if self.is_ours else "peer"
        return {"command": "build", "kind": kind, "work": vars_of(work), "options": options}

    def expected_bytes(self, work: Work, has_gpu: bool) -> int:
        """Memory of all its processes together; the guess at activations is good to a third."""
        config = work.config
        stage = ZERO_STAGES.get(self.engine)
        states = model_state_bytes(work.counts[0], work.dtype, stage, self.processes)
        # Peers, and ours on a GPU, run attention kernels that keep no T × T scores.
        on_cpu = self.is_ours and not has_gpu
        activations = activation_bytes(config, work.batch_size, work.dtype, on_cpu)
        return self.processes * int(BARE_PROCESS_BYTES + states + 4 / 3 * activations)


def vars_of(work: Work) -> dict:
    """The fields of a Work, without what it has computed."""
    return {name: getattr(work, name) for name in Work.__dataclass_fields__}


def all_contenders(processes: int, has_gpu: bool, allocator: str) -> list[Contender]:
    """In the order in which they take turns and stand in the table.

    Args:
        processes: of the engines that can have several.
        has_gpu: then there is no allocator to choose: GPU memory does not come from the C library.
        allocator: which variants of the peers to have on a CPU, one of ALLOCATORS.
    """
    found = []
    for engine in ("single", "ddp", "zero1", "zero2", "alone"):
        ranks = 1 if engine == "single" else processes
        found += [Contender("ours", mode, engine, processes=ranks) for mode in (False, True)]
    variants = ("default", "ours") if allocator == "both" else (allocator,)
    for family in PEERS:
        for mode in (False, True):
            for variant in ("default",) if has_gpu else variants:
                found.append(Contender(family, mode, allocator=variant))
    return found


def select(contenders: list[Contender], words: list[str]) -> list[Contender]:
    """Those that one of the words names, a name or a group.

    Raises:
        UsageError: a word that names none; the message lists those that do.
    """
    known = sorted({tag for contender in contenders for tag in contender.tags})
    for word in words:
        if word not in known:
            raise UsageError(f"--contenders: {word!r} is none of {', '.join(known)}")
    return [contender for contender in contenders if contender.tags & set(words)]


def obstacle(contender: Contender, n_gpus: int) -> str | None:
    """Why it cannot run here, in one line; None where nothing is known to be in the way."""
    if not contender.is_ours and find_spec(contender.family) is None:
        return (
            f"{contender.family} is not installed: "
            "pip install --no-deps -r requirements-benchmarks.txt"
        )
    if contender.is_ours and contender.compiled and not can_compile():
        return "the training script has no --compile"
    if contender.compiled and (reason := compiler_obstacle(n_gpus > 0)):
        return reason
    if contender.engine in ("ddp", "alone") and contender.processes == 1:
        return f"{contender.engine} takes two processes or more: --processes 2"
    if 0 < n_gpus < contender.processes:
        return f"{contender.processes} processes for {n_gpus} GPUs"
    return None


def environments(contender: Contender, port: int, folder: Path, fresh: bool) -> list[dict]:
    """Environment variables of each rank's process: what `accelerate launch` would set.

    Args:
        contender: whose.
        port: free, where the ranks meet.
        folder: a temporary one of this contender's, for its DeepSpeed file and compiled code.
        fresh: compile into that folder, so that nothing is found there compiled already.
    """
    common = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "TORCHELASTIC")) and name not in LAUNCHER_VARIABLES
    }
    # DeepSpeed and inductor look for their tools, such as ninja, on PATH.
    common["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if fresh:
        common["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
        common["TRITON_CACHE_DIR"] = str(folder / "triton")
    if contender.engine == "single":
        return [common]
    if contender.engine == "alone":
        return [
            common | own_share(rank, contender.processes) for rank in range(contender.processes)
        ]
    common |= {
        "WORLD_SIZE": str(contender.processes),
        "LOCAL_WORLD_SIZE": str(contender.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_MIXED_PRECISION": "no",  # what launchers set when they are not told
    }
    if stage := ZERO_STAGES.get(contender.engine):
        config = json.loads((REPOSITORY / "ds_config.json").read_text(encoding="utf-8"))
        config["zero_optimization"]["stage"] = stage
        path = folder / "ds_config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        common["ACCELERATE_USE_DEEPSPEED"] = "true"
        common["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)
    ranks = range(contender.processes)
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks]


def own_share(rank: int, processes: int) -> dict[str, str]:
    """Environment of a process that has a GPU, or its part of the cores, to itself."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(processes)))).split(",")
    gpu = gpus[rank] if rank < len(gpus) else ""
    cores = available_cores() // processes
    return {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": str(max(1, cores))}
