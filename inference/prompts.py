"""Prompts from flags, from a file, and from the keyboard."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from common.errors import UsageError
from common.parser import is_text


def read_prompts(given: list[str], path: str | None) -> list[str]:
    """Return the given prompts, then those of a file.

    Args:
        path: a file with one prompt per line, or .jsonl; "-" is stdin.

    Raises UsageError: no prompt, an empty one, or a file that cannot be read.
    """
    prompts = list(given)
    if path:
        try:
            raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
            # Not splitlines, which cuts at form feeds and Unicode's own line separators too.
            lines = raw.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
            if path.endswith(".jsonl"):
                prompts += [_prompt_of(line, n) for n, line in enumerate(lines, 1) if line.strip()]
            else:
                prompts += [line for line in lines if line]
        except (OSError, ValueError) as error:
            raise UsageError(f"--prompts {path}: {error}") from error
    if not prompts:
        empty = f"--prompts {path}: there is no prompt in it"
        none = "nothing to continue: give --prompt, --prompts or --interactive"
        raise UsageError(empty if path else none)
    return [require_text(prompt) for prompt in prompts]


def require_text(prompt: str) -> str:
    """Return the prompt. Raises UsageError: it is empty, or holds bytes that are no text."""
    if not prompt:
        raise UsageError("an empty prompt: the model needs something to continue")
    if not is_text(prompt):
        raise UsageError(f"the prompt {prompt!r} is not valid UTF-8")
    return prompt


def typed_lines() -> Iterator[str]:
    """Yield what is typed, line by line, until Ctrl-D. Raises UsageError: input that is no text."""
    while True:
        try:
            yield input("\n> ")
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\nCtrl-D ends the program.")
        except UnicodeDecodeError as error:
            raise UsageError(f"what was typed is not valid UTF-8: {error}") from error


def say(text: str) -> None:
    """Print a remark to stderr; stdout is for what the model writes."""
    print(text, file=sys.stderr, flush=True)


def _prompt_of(line: str, number: int) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is no JSON") from error
    prompt = row.get("prompt", row.get("text")) if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f"line {number} has no 'prompt' and no 'text'")
    return prompt
