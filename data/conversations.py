"""Conversations in the forms of other projects: one JSON object each, told apart by their keys.

    {"conversations": [{"role": "user", "content": "…"}, …]}    MiniMind
    {"messages": [{"role": "user", "content": "…"}, …]}         OpenAI; "weight": 0 leaves an answer
                                                                out of the loss
    {"prompt": "…", "chosen": "…"}, {"prompt", "response"}      DeepSpeed-Chat, as Dahoas/rm-static
    {"instruction": "…", "input": "…", "output": "…"}           Alpaca; input may be missing

A prompt that begins with "\\n\\nHuman:" holds several turns, as in Anthropic's hh-rlhf. The
built-in conversations ask about the docstrings of Python's standard library.
"""

import ast
import json
import os
import re
import sysconfig
import textwrap
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from common.parser import is_text
from data.corpus import JSONL, Record, parquet_rows, read_records
from data.errors import DataError

SUFFIXES = (*JSONL, ".parquet")
ROLES = SYSTEM, USER, ASSISTANT = ("system", "user", "assistant")
LISTS = ("conversations", "messages")
ANSWERS = ("chosen", "response")
KEYS = (*LISTS, "prompt", *ANSWERS, "instruction", "input", "output")
# Of what the built-in conversations ask about, in characters.
LONGEST_SIGNATURE, SUMMARY_LENGTHS = 120, range(20, 301)


class Turn(NamedTuple):
    role: str  # one of ROLES
    content: str
    has_weight: bool = True

    @property
    def counts(self) -> bool:
        """True for an answer that counts in the loss."""
        return self.role == ASSISTANT and self.has_weight


def conversation_records(files: list[str]) -> Iterator[Record]:
    """Yield every conversation of every file, as JSON. Raises DataError: see `read_records`."""
    if files[0].endswith(".py"):
        yield from _about_docstrings(files)
        return
    for path in files:
        if path.endswith(".parquet"):
            for number, row in enumerate(parquet_rows(path, KEYS), 1):
                yield Record(path, number, json.dumps(row, default=str).encode())
        else:
            yield from read_records([path])


def parse_conversation(value: dict, where: str) -> list[Turn]:
    """Return the turns of a conversation. Raises DataError, which begins with `where`: it is in no
    known form, or has no answer that counts; see also `check_turns`."""
    check_turns(turns := _turns(value, where), where)
    if not any(turn.counts for turn in turns):
        raise DataError(f"{where}: no answer of an assistant in it that counts")
    return turns


def check_turns(turns: Iterable[Turn], where: str) -> None:
    """Raise DataError if user and assistant do not take turns, perhaps after a system's turn, if
    one is no text, or an answer is empty."""
    expected = (SYSTEM, USER)
    for number, (role, content, _) in enumerate(turns, 1):
        place = f"{where}: turn {number}"
        if role not in expected:
            known = " or ".join(expected)
            raise DataError(f"{place} has the role {_shown(role)}, expected is {known}")
        if not isinstance(content, str) or not is_text(content):
            raise DataError(f"{place} has {_shown(content)} in place of a text")
        if role == ASSISTANT and not content.strip():
            raise DataError(f"{place} is an empty answer")
        expected = (ASSISTANT,) if role == USER else (USER,)


def _shown(value: object) -> str:
    return textwrap.shorten(repr(value), 40)


def _turns(value: object, where: str) -> list[Turn]:
    keys = KEYS if isinstance(value, dict) else ()
    given = {key: value[key] for key in keys if value.get(key) is not None}  # null: in a table
    for key in LISTS:
        if key in given:
            return _listed_turns(given[key], where)
    if all(isinstance(text, str) for text in given.values()):
        answers = [given[key] for key in ANSWERS if key in given]
        if "prompt" in given and answers:
            return _turns_of_prompt(given["prompt"], answers[0])
        if "instruction" in given and "output" in given:
            asked = "\n\n".join(filter(None, (given["instruction"], given.get("input"))))
            return [Turn(USER, asked), Turn(ASSISTANT, given["output"])]
    raise DataError(
        f'{where}: no conversation, which has "conversations", "messages", "prompt" with "chosen" '
        'or "response", or "instruction" with "output", as texts'
    )


def _listed_turns(turns: object, where: str) -> list[Turn]:
    with suppress(TypeError, KeyError, AttributeError):
        if all(turn.get("weight") in (None, 0, 1) for turn in turns):
            return [Turn(t["role"], t["content"], t.get("weight") != 0) for t in turns]
    form = 'list of {"role": ..., "content": ...}, perhaps with "weight": 0 or 1'
    raise DataError(f"{where}: no {form}, but {_shown(turns)}")


def _turns_of_prompt(prompt: str, answer: str) -> list[Turn]:
    # In rm-static a prompt ends with the "Assistant:" of the answer.
    if not prompt.startswith("\n\nHuman:"):
        return [Turn(USER, prompt), Turn(ASSISTANT, answer)]
    _, *parts = re.split(r"\n\n(Human|Assistant):", prompt)  # "Human", what it says, ...
    if parts[-2] == "Assistant" and not parts[-1].strip():
        parts = parts[:-2]
    roles = {"Human": USER, "Assistant": ASSISTANT}
    said = zip(parts[::2], parts[1::2], strict=True)
    turns = [Turn(roles[who], text.strip()) for who, text in said]
    return [*turns, Turn(ASSISTANT, answer.strip())]


def _about_docstrings(files: list[str]) -> Iterator[Record]:
    """Yield a question about each public function, method and class; the answer is its signature
    or its summary. With both, one in validation could be learned from the other."""
    seen = set()
    for path in files:
        relative = os.path.relpath(path, sysconfig.get_path("stdlib")).removesuffix(".py")
        module = relative.replace(os.sep, ".").removesuffix(".__init__")
        if any(part.startswith("_") for part in module.split(".")):
            continue
        try:
            with open(path, "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some files misspell escape sequences
                tree = ast.parse(file.read())
        except (SyntaxError, ValueError):  # some files hold a mistake on purpose
            continue
        for line, kind, signature, summary in _documented(tree, module, "function"):
            if signature in seen or summary in seen:
                continue
            seen |= {signature, summary}
            if zlib.crc32(signature.encode()) % 2:
                question, answer = f"What does `{signature}` do?", summary
            else:
                question, answer = f"Which {kind} does this: {summary}", f"`{signature}`"
            value = {"prompt": question, "response": answer}
            yield Record(path, line, json.dumps(value).encode())


def _documented(node: ast.AST, name: str, kind: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield the public definitions in a module or class: line, "function", "method" or "class",
    signature as in "shutil.which(cmd, path=None)", summary."""
    for item in node.body:
        is_class = isinstance(item, ast.ClassDef)
        if not is_class and not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if item.name.startswith("_"):
            continue
        arguments = "" if is_class else f"({ast.unparse(item.args)})"
        signature = f"{name}.{item.name}{arguments}"
        summary = " ".join((ast.get_docstring(item) or "").split("\n\n")[0].split())
        is_summary = len(summary) in SUMMARY_LENGTHS and not summary.startswith(f"{item.name}(")
        if is_summary and len(signature) <= LONGEST_SIGNATURE:
            yield item.lineno, "class" if is_class else kind, signature, summary
        if is_class:
            yield from _documented(item, f"{name}.{item.name}", "method")
