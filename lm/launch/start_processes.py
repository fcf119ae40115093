"""Start the processes with the flags of preflight, and report a failure in one or two lines."""

import logging
import os
import sys
from pathlib import Path

import torch.distributed.run  # creates the loggers that `start` silences
from accelerate.commands import launch
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lm.common.errors import EXIT_CODE
from lm.common.tasks import forget_tasks
from lm.training.interruption import STOP_NOTE, how_to_resume


def start() -> int:
    """Launch the processes and wait until they end. Return the exit code for run_accelerate.sh."""
    forget_tasks()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found no GPU
    for name in logging.root.manager.loggerDict:
        if name.startswith(torch.distributed.__name__):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Without this, a launcher waits five minutes for a stopped launcher on another machine.
    SimpleElasticAgent._exit_barrier = lambda agent: None
    launch.simple_launcher = become_program
    try:
        launch.main()
    except SignalException as stopped:
        if not Path(os.environ[STOP_NOTE]).exists():
            say(f"stopped by {stopped.sigval.name}")
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = failure.signal_name()  # SIGKILL if the machine ran out of memory
        say(f"error: process {rank} was ended by {name}; to resume:\n  {how_to_resume('auto')}")
        return 1
    except (ConnectionError, torch.distributed.DistError) as failed:  # no process has started
        say(f"error: the machines cannot meet: {str(failed).splitlines()[0]}")
        return EXIT_CODE
    return 0


def become_program(args) -> None:
    """Replace the launcher's process by the only training process, which then gets all signals."""
    command, environ = launch.prepare_simple_launcher_cmd_env(args)
    os.execvpe(command[0], command, environ)


def say(text: str) -> None:
    """Print a text to stderr, after the name run_accelerate.sh."""
    print(f"run_accelerate.sh: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(start())
