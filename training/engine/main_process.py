"""What the main process decides for all, so that no two processes decide differently."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from common.errors import UsageError
from model import ConfigError

Answer = TypeVar("Answer")


def on_main_process(accelerator: Accelerator, decide: Callable[[], Answer]) -> Answer:
    """What `decide` returns on the main process, on all of them; all must call this. Raises
    UsageError, ConfigError: what `decide` raised there."""
    answer: list = [None, None]
    if accelerator.is_main_process:
        try:
            answer[0] = decide()
        except (UsageError, ConfigError) as error:
            answer[1] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
