"""Who takes part: names, and how their processes are started."""

import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.peers import PEERS
from common.cpu import available_cores
from common.errors import UsageError

ZERO_STAGES = {"zero1": 1, "zero2": 2}
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    The engine "alone" is as many processes as the other engines have, each with its share of the
    cores, that know nothing of each other: what the others would reach if they exchanged nothing.
    """

    family: str  # "ours" or a key of PEERS
    compiled: bool
    engine: str = "single"  # of ours: single, ddp, zero1, zero2, alone
    processes: int = 1
    our_allocator: bool = False  # a peer that is given the training script's settings
    fused: bool = False  # ours with benchmarks.projections, which the project does not have
    recompute: str = "off"  # of ours: --gradient_checkpointing

    @property
    def is_ours(self) -> bool:
        return self.family == "ours"

    @property
    def name(self) -> str:
        engine = "" if self.engine == "single" else f"-{self.engine}"
        mode = "compiled" if self.compiled else "eager"
        name = f"{self.family}{engine}-{mode}"
        name += "+allocator" * self.our_allocator + "+fused" * self.fused
        return name if self.recompute == "off" else f"{name}+{self.recompute}"

    @property
    def words(self) -> set[str]:
        """Every word of --contenders that means this one; an experiment has its name alone."""
        if self.fused:
            return {self.name}
        if self.recompute != "off":
            return {self.name, "recompute"}
        mode = "compiled" if self.compiled else "eager"
        return {"all", self.name, self.family, mode} | ({"peers"} if not self.is_ours else set())


def all_contenders(processes: int, has_gpu: bool) -> list[Contender]:
    """In the order in which they take turns and stand in the table.

    Args:
        processes: of the engines that can have several.
        has_gpu: then there is no allocator to choose, for GPU memory does not come from the C
            library, and nobody is "alone".
    """
    engines = ["single", "zero1", "zero2"]
    if processes > 1:
        engines[1:1] = ["ddp"] if has_gpu else ["alone", "ddp"]
    found = [
        Contender("ours", compiled, engine, 1 if engine == "single" else processes)
        for engine in engines
        for compiled in (False, True)
    ]
    found += [Contender("ours", compiled, fused=True) for compiled in (False, True)]
    found += [
        Contender("ours", compiled, recompute=what)
        for compiled in (False, True)
        for what in ("blocks", "selective")
    ]
    found += [
        Contender(family, compiled, our_allocator=ours)
        for family in PEERS
        for compiled in (False, True)
        for ours in ((False,) if has_gpu else (False, True))
    ]
    return found


def select(contenders: list[Contender], text: str) -> list[Contender]:
    """Those that one of the words names, a name or a group, with commas between them.

    Raises:
        UsageError: a word that names none; the message lists those that do.
    """
    known = sorted(set().union(*(contender.words for contender in contenders)))
    words = {word.strip() for word in text.split(",")}
    if wrong := words - set(known):
        raise UsageError(f"--contenders: {min(wrong)!r} is none of {', '.join(known)}")
    return [contender for contender in contenders if contender.words & words]


def obstacle(contender: Contender) -> str | None:
    """Why it cannot run here, as far as that is known beforehand."""
    if contender.is_ours or find_spec(contender.family):
        return None
    how = "pip install --no-deps -r requirements-benchmarks.txt"
    return f"{contender.family} is not installed: {how}"


def environments(
    contender: Contender, port: int, folder: Path, fresh_compile: bool
) -> list[dict[str, str]]:
    """Environment variables of each rank's process: what `accelerate launch` would set.

    Args:
        contender: whose.
        port: free, where the ranks meet.
        folder: a temporary one of this contender's, for its DeepSpeed file and compiled code.
        fresh_compile: into that folder, so that nothing is found there compiled already.
    """
    common = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "TORCHELASTIC")) and name not in LAUNCHER_VARIABLES
    }
    # DeepSpeed and inductor look for their tools, such as ninja, on PATH.
    common["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if fresh_compile:
        common["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
        common["TRITON_CACHE_DIR"] = str(folder / "triton")
    ranks = range(contender.processes)
    if contender.engine == "single":
        return [common]
    if contender.engine == "alone":
        cores = available_cores() // contender.processes
        return [common | {"OMP_NUM_THREADS": str(max(1, cores))} for _ in ranks]
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
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks]
