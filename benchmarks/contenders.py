"""Who takes part in `benchmarks.throughput`: names, flags, and their processes' environments."""

import socket
from dataclasses import dataclass
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.cli import clean_environment
from benchmarks.peers import PEERS
from common.cpu import available_cores
from common.errors import UsageError
from training.engine.kinds import FILES

# How an engine must call itself, because engines are known to be switched off without a word.
ENGINES = {
    "single": "single process",
    "alone": "single process",
    "ddp": "DDP",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
}


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    The engine "alone" is as many processes as the other engines have, each with its share of the
    cores, that know nothing of each other: the speed of the others if they exchanged nothing.
    """

    family: str  # "ours" or a key of PEERS
    compiled: bool
    engine: str = "single"  # of ours, a key of ENGINES
    processes: int = 1
    our_allocator: bool = False  # a peer that is given the training script's settings
    recompute: str = "off"  # of ours: --gradient_checkpointing

    @property
    def is_ours(self) -> bool:
        return self.family == "ours"

    @property
    def mode(self) -> str:
        return "compiled" if self.compiled else "eager"

    @property
    def name(self) -> str:
        engine = "" if self.engine == "single" else f"-{self.engine}"
        variant = "+allocator" if self.our_allocator else ""
        variant += "" if self.recompute == "off" else f"+{self.recompute}"
        return f"{self.family}{engine}-{self.mode}{variant}"

    @property
    def words(self) -> set[str]:
        """Every word of --contenders that means this one."""
        if self.recompute != "off":
            return {self.name, "recompute"}
        return {"all", self.name, self.family, self.mode, "ours" if self.is_ours else "peers"}

    def flags(self) -> list[str]:
        """Return what the training script is told besides the work."""
        words = ["--compile", "on" if self.compiled else "off"]
        words += ["--gradient_checkpointing", self.recompute]
        if self.engine in FILES:
            words += ["--deepspeed", str(REPOSITORY / FILES[self.engine])]
        return words


def all_contenders(processes: int, has_gpu: bool) -> list[Contender]:
    """Return all contenders in the order of the table.

    Args:
        processes: of the engines that can have several.
        has_gpu: GPU memory does not come from the C library, so there is no allocator to choose,
            and nobody is "alone".
    """
    engines = ["single", "zero1", "zero2"]
    if processes > 1:
        engines[1:1] = ["ddp"] if has_gpu else ["alone", "ddp"]
    found = []
    for engine in engines:
        number = 1 if engine == "single" else processes
        found += [Contender("ours", compiled, engine, number) for compiled in (False, True)]
    for compiled in (False, True):
        for recompute in ("blocks", "selective"):
            found.append(Contender("ours", compiled, recompute=recompute))
    for family in PEERS:
        for compiled in (False, True):
            for ours in (False,) if has_gpu else (False, True):
                found.append(Contender(family, compiled, our_allocator=ours))
    return found


def select(contenders: list[Contender], text: str) -> list[Contender]:
    """Return the contenders that one of the words names, a name or a group.

    Raises UsageError: a word that names none; the message lists those that do.
    """
    known = sorted(set().union(*(contender.words for contender in contenders)))
    words = {word.strip() for word in text.split(",")}
    if wrong := words - set(known):
        raise UsageError(f"--contenders: {min(wrong)!r} is none of {', '.join(known)}")
    return [contender for contender in contenders if contender.words & words]


def environments(
    contender: Contender, folder: Path, fresh_compile: bool = False
) -> list[dict[str, str]]:
    """Return the environment variables of each rank's process.

    Args:
        folder: a temporary one of this contender's, for compiled code.
        fresh_compile: compile into that folder, where nothing is found compiled already.
    """
    common = clean_environment()
    # A process that is killed leaves semaphores, which Python's helper would warn of.
    common["PYTHONWARNINGS"] = "ignore:resource_tracker"
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
        "MASTER_PORT": str(free_port()),
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
