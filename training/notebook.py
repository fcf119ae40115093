"""A run in a program that lives on after it, such as a notebook's kernel."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.state import AcceleratorState, GradientState

from runs.folder import release_locks
from training.interruption import SIGNALS


@contextmanager
def leave_as_found(program: str, argv: list[str] | None) -> Iterator[None]:
    """Leave the process so that another run can begin in it.

    Accelerate keeps one state per process and refuses another precision; torch.compile stops after
    eight models; a run folder stays locked while its process lives; signals would still go to the
    run that has ended; and the environment would give the next run this run's engine.

    In here sys.argv is the command of the same run at a terminal. With argv None the flags came
    from the command line: the process ends with the run, and nothing is changed.
    """
    if argv is None:
        yield
        return
    command, sys.argv = sys.argv, [program, *argv]
    environ = os.environ.copy()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    _forget_models()
    try:
        yield
    finally:
        _forget_models()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        release_locks()
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = command


def _forget_models() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if "torch._dynamo" in sys.modules:  # loading it takes seconds, and nothing has been compiled
        torch.compiler.reset()
