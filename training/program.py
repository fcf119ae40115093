"""From a command line to a training, and to one line where something is wrong."""

from collections.abc import Callable

from common.errors import UsageError, one_line_errors
from model import ConfigError
from training.arguments import Arguments, parse_arguments
from training.engine.failures import one_line_failures
from training.notebook import leave_as_found


def run_program(
    kind: type[Arguments], train: Callable[[Arguments, dict], None], argv: list[str] | None
) -> None:
    """Call `train` with the flags in argv, after which the process is as it was before; None takes
    those of the command line, and the process ends with the run.

    Args:
        train: gets the arguments, of this kind, and those settings of the model that were typed.
    """
    with one_line_errors(kind.program, UsageError, ConfigError), leave_as_found(kind.program, argv):
        args, model_settings = parse_arguments(argv, kind)
        with one_line_failures(args, model_settings):
            train(args, model_settings)
