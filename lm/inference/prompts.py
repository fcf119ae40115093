"""Read prompts from flags, from a file, and from the keyboard."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from lm.common.errors import UsageError, reason
from lm.common.parser import is_text


def read_prompts(given: list[str], path: str | None) -> list[str]:
    """Return `given` and the prompts in the file `path` ("-": stdin). A non-empty line is a prompt
    or, in .jsonl, an object with the key "prompt". Raises UsageError for bad prompts or none."""
    prompts = list(given)
    if path:
        try:
            raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
            # splitlines would also split at form feeds and at Unicode's line separators.
            lines = raw.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
            is_json = path.endswith(".jsonl")
            prompts += [json.loads(line)["prompt"] if is_json else line for line in lines if line]
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise UsageError(f"--prompts {path}: {reason(error)}") from error
    if not prompts:
        raise UsageError("nothing to continue: pass --prompt, --prompts or --interactive")
    return [require_text(prompt) for prompt in prompts]


def require_text(prompt: str) -> str:
    """Return the prompt. Raises UsageError if it is empty, or not valid UTF-8 text."""
    if not prompt or not is_text(prompt):
        problem = "empty" if prompt == "" else "not valid UTF-8 text"
        raise UsageError(f"prompt {prompt!r} is {problem}")
    return prompt


def converse(answer: Callable[[str], None]) -> None:
    """Call `answer` with each line of stdin that is not blank, until Ctrl-D. Ctrl-C only stops
    the current answer. Raises UsageError if a line is refused and stdin is not a terminal."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # to answer the lines before a bad byte
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            line = input("\n> " if sys.stdout.isatty() else "")
            if line.strip():
                answer(require_text(line))
        except EOFError:
            say("")
            return
        except UsageError as error:
            if not sys.stdin.isatty():
                raise
            say(str(error))
        except KeyboardInterrupt:
            say("\nCtrl-D ends the program.")


def say(text: str) -> None:
    """Print a message to stderr, on rank 0. stdout is for the model's text."""
    if not int(os.environ.get("RANK", 0)):
        print(text, file=sys.stderr, flush=True)
