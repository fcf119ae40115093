"""What is to be continued: prompts from the command line, a file, or stdin."""

import json
import sys
from pathlib import Path

from common.errors import UsageError


def read_prompts(given: list[str], path: str | None) -> list[str]:
    """Those that were given, then those of a file.

    Args:
        path: a file of prompts, one in a line, or .jsonl; "-" is stdin.

    Raises UsageError: none, an empty one, or a file that cannot be read.
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
            raise UsageError(f"--prompts {path}: there is no prompt in it")
    if not prompts:
        raise UsageError("nothing to continue: give --prompt, --prompts or --interactive")
    return [require_text(prompt) for prompt in prompts]


def require_text(prompt: str) -> str:
    """The prompt itself. Raises UsageError: there is nothing in it, or bytes that are no text."""
    if not prompt:
        raise UsageError("an empty prompt: the model needs something to continue")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt {prompt!r} is not valid UTF-8") from error
    return prompt


def _prompt_of(line: str, number: int) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is no JSON") from error
    prompt = row.get("prompt", row.get("text")) if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f"line {number} has no 'prompt' and no 'text'")
    return prompt
