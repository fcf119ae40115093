"""Share decisions and errors among processes: an error in one process ends all processes."""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch

from lm.common.errors import UsageError
from lm.engine.engine import Engine
from model import ConfigError

Answer = TypeVar("Answer")


def on_main_process(engine: Engine | None, decide: Callable[[], Answer]) -> Answer:
    """Call `decide` on the main process and return its answer on every process.
    Every process must call this. Raises the UsageError or ConfigError that `decide` raised."""
    is_main = engine is None or engine.is_main
    mine = _tried(decide) if is_main else None  # (answer, error)
    (answer, error), _ = _gather(engine, mine)[0]
    if error:
        raise error
    return answer


def on_every_process(engine: Engine | None, attempt: Callable[[], Answer]) -> Answer:
    """Call `attempt` on every process; return the answer of this process.
    Every process must call this. Raises the UsageError or ConfigError that `attempt` raised on at
    least one process. The message names the ranks that failed, unless all failed."""
    answer, error = _tried(attempt)
    everyone = _gather(engine, error)
    errors = [error for error, _ in everyone if error]
    if not errors:
        return answer
    if len(errors) == len(everyone):
        raise errors[0]
    places = [f"rank {rank} on {host}" for rank, (error, host) in enumerate(everyone) if error]
    raise type(errors[0])(
        f"{errors[0]} (of {len(everyone)} processes only {', '.join(places)}: every machine needs "
        "the same files)"
    )


def _tried(attempt: Callable[[], Answer]) -> tuple[Answer | None, Exception | None]:
    """Return (answer, None), or (None, error) if `attempt` raised a UsageError or ConfigError."""
    try:
        return attempt(), None
    except (UsageError, ConfigError) as mistake:
        return None, mistake


def require_the_same(engine: Engine, facts: dict) -> None:
    """Raise UsageError if facts of a process differ from rank 0's. Every process must call this."""
    everyone = _gather(engine, facts)
    main, _ = everyone[0]
    for rank, (other, host) in enumerate(everyone):
        different = [key for key in main | other if other.get(key) != main.get(key)]
        if different:
            theirs = [f"{key} {other.get(key)} (not {main.get(key)})" for key in different[:3]]
            remedy = "start all machines with the same flags and data"
            raise UsageError(f"rank {rank} on {host} has {', '.join(theirs)}: {remedy}")


def _gather(engine: Engine | None, mine) -> list[tuple]:
    """Return (`mine`, host name) of every process, ordered by rank."""
    pair = (mine, socket.gethostname())
    if engine is None or engine.cpu_group is None:  # a single process
        return [pair]
    everyone = [None] * engine.processes
    torch.distributed.all_gather_object(everyone, pair, group=engine.cpu_group)
    return everyone
