"""Who takes part in `benchmarks.throughput`: names, flags, and their processes' environments."""

import socket
from dataclasses import dataclass
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.cli import clean_environment
from benchmarks.peers import PEERS
from common.errors import UsageError
from training.engine.kinds import FILES

# How an engine must call itself, because engines are known to be switched off without a word.
ENGINES = {
    "single": "single process",
    "ddp": "DDP",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
}
VARIANTS = {  # of ours: flags of the training script
    "blocks": ["--gradient_checkpointing", "blocks"],
    "selective": ["--gradient_checkpointing", "selective"],
    "muon": ["--optimizer", "muon"],
}
ALLOCATOR = "allocator"  # a peer's variant: it keeps freed memory, as the training script does


@dataclass(frozen=True)
class Contender:
    """One way to do the work."""

    family: str  # "ours" or a key of PEERS
    compiled: bool
    engine: str = "single"  # of ours, a key of ENGINES
    processes: int = 1
    variant: str = ""  # a key of VARIANTS, or ALLOCATOR

    @property
    def is_ours(self) -> bool:
        return self.family == "ours"

    @property
    def name(self) -> str:
        engine = "" if self.engine == "single" else f"-{self.engine}"
        mode = "compiled" if self.compiled else "eager"
        return f"{self.family}{engine}-{mode}" + (f"+{self.variant}" if self.variant else "")

    @property
    def words(self) -> set[str]:
        """Every word of --contenders that means this one."""
        if self.variant in VARIANTS:
            return {self.name, self.variant}
        return {"all", self.name, self.family, "ours" if self.is_ours else "peers"}

    def flags(self) -> list[str]:
        """Return what the training script is told besides the work."""
        words = ["--compile", "on" if self.compiled else "off", *VARIANTS.get(self.variant, [])]
        if self.engine in FILES:
            words += ["--deepspeed", str(REPOSITORY / FILES[self.engine])]
        return words


def all_contenders(processes: int, has_gpu: bool) -> list[Contender]:
    """Return all contenders in the order of the table.

    Args:
        processes: of the engines that can have several.
        has_gpu: GPU memory does not come from the C library, so there is no allocator to choose.
    """
    found = []
    for compiled in (False, True):
        found.append(Contender("ours", compiled))
        engines = ["ddp", "zero1", "zero2"] if processes > 1 else ["zero1", "zero2"]
        found += [Contender("ours", compiled, engine, processes) for engine in engines]
        found += [Contender("ours", compiled, variant=variant) for variant in VARIANTS]
    for family in PEERS:
        for compiled in (False, True):
            variants = [""] if has_gpu else ["", ALLOCATOR]
            found += [Contender(family, compiled, variant=variant) for variant in variants]
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
    if contender.engine == "single":
        return [common]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common |= {
        "WORLD_SIZE": str(contender.processes),
        "LOCAL_WORLD_SIZE": str(contender.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = map(str, range(contender.processes))
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks]
