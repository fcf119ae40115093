"""Decisions that hold for all processes: a mistake of one ends all."""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch

from common.errors import UsageError
from model import ConfigError
from training.engine.launch import Engine

Answer = TypeVar("Answer")


def on_main_process(engine: Engine | None, decide: Callable[[], Answer]) -> Answer:
    """Call `decide` on the main process, return its answer on all; all must call this.
    Raises UsageError, ConfigError: as `decide` did."""
    if engine is None or engine.cpu_group is None:
        return decide()
    mine = _tried(decide) if engine.is_main else None
    (answer, error), _ = _gather(engine, mine)[0]
    if error:
        raise error
    return answer


def on_every_process(engine: Engine | None, attempt: Callable[[], Answer]) -> Answer:
    """Call `attempt` and return its answer on this process; all must call this.
    Raises UsageError, ConfigError: as `attempt` did on any process, and where."""
    if engine is None or engine.cpu_group is None:
        return attempt()
    answer, error = _tried(attempt)
    everyone = _gather(engine, error)
    errors = [error for error, _ in everyone if error]
    if not errors:
        return answer
    if len(errors) == len(everyone):
        raise errors[0]
    places = [f"rank {rank} on {host}" for rank, (error, host) in enumerate(everyone) if error]
    raise type(errors[0])(
        f"{errors[0]} (only {', '.join(places)} of {len(everyone)} processes: every machine needs "
        "the same files)"
    )


def _tried(attempt: Callable[[], Answer]) -> tuple[Answer | None, Exception | None]:
    try:
        return attempt(), None
    except (UsageError, ConfigError) as mistake:
        return None, mistake


def require_the_same(engine: Engine, facts: dict) -> None:
    """Raise UsageError if a process has other facts; all must call this."""
    if engine.cpu_group is None:
        return
    everyone = _gather(engine, facts)
    main, _ = everyone[0]
    for rank, (other, host) in enumerate(everyone):
        if different := [key for key in main | other if other.get(key) != main.get(key)]:
            theirs = [f"{key} {other.get(key)} (not {main.get(key)})" for key in different[:3]]
            raise UsageError(
                f"rank {rank} on {host} has {', '.join(theirs)}: start all machines with the same "
                "flags, on the same data"
            )


def _gather(engine: Engine, mine) -> list[tuple]:
    """Return (object, host name) of every process."""
    everyone = [None] * engine.processes
    told = (mine, socket.gethostname())
    torch.distributed.all_gather_object(everyone, told, group=engine.cpu_group)
    return everyone
