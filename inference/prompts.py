"""Prompts from flags, from a file, and from the keyboard."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from common.errors import UsageError
from common.parser import is_text


def read_prompts(given: list[str], path: str | None) -> list[str]:
    """Return the given prompts, then those of a file with one per line, or .jsonl; "-" is stdin.

    Raises UsageError: no prompt, an empty one, or a file that cannot be read.
    """
    prompts = list(given)
    if path:
        try:
            raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
            # Not splitlines, which cuts at form feeds and Unicode's own line separators too.
            lines = raw.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
            parse = _prompt_of if path.endswith(".jsonl") else str
            prompts += [parse(line) for line in lines if line]
        except (OSError, ValueError) as error:
            raise UsageError(f"--prompts {path}: {error}") from error
    if not prompts:
        raise UsageError("nothing to continue: give --prompt, --prompts or --interactive")
    return [require_text(prompt) for prompt in prompts]


def _prompt_of(line: str) -> str:
    try:
        row = json.loads(line)
        return str(row["prompt"] if "prompt" in row else row["text"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"no JSON object with 'prompt' or 'text': {line[:80]}") from error


def require_text(prompt: str) -> str:
    """Return the prompt. Raises UsageError: it is empty, or holds bytes that are no text."""
    if not prompt or not is_text(prompt):
        raise UsageError(f"prompt {prompt!r} is empty, or not valid UTF-8")
    return prompt


def converse(answer: Callable[[str], None]) -> None:
    """Hand each typed line to `answer` until Ctrl-D. Ctrl-C stops an answer."""
    while True:
        try:
            line = input("\n> ")
            if line.strip():
                answer(require_text(line))
        except EOFError:
            say("")
            return
        except UsageError as error:
            say(str(error))
        except KeyboardInterrupt:
            say("\nCtrl-D ends the program.")


def say(text: str) -> None:
    """Print a remark to stderr; stdout is for what the model writes."""
    print(text, file=sys.stderr, flush=True)
