"""Read conversations in the formats of other projects, and mask all tokens that are no answer.

Each conversation is one JSON object. Its keys determine the format:

    {"messages": [{"role": "user", "content": "…"}, …]}         OpenAI
    {"conversations": [{"role": "user", "content": "…"}, …]}    MiniMind
    {"conversations": [{"from": "human", "value": "…"}, …]}     ShareGPT
    {"prompt": "…", "completion": "…"}                          TRL; two texts or two lists
    {"prompt": "…", "chosen": "…"}, {"prompt", "response"}      DeepSpeed-Chat (Dahoas/rm-static)
    {"instruction": "…", "input": "…", "output": "…"}           Alpaca; input may be missing

docs/fine-tuning.md lists further keys, and keys that are refused or not read. A prompt that begins
with "\\n\\nHuman:" holds several turns, as in Dahoas/rm-static. The built-in conversations are made
from the docstrings of Python's standard library.
"""

import ast
import json
import os
import re
import sysconfig
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import UsageError
from lm.common.parser import is_text
from lm.data.corpus import JSON, Record, read_records, suffix_of
from lm.data.tokenizer import Tokenizer

CHAT_SUFFIXES = (*JSON, ".parquet")
ROLES = SYSTEM, USER, ASSISTANT = ("system", "user", "assistant")
SHAREGPT = {"human": USER, "gpt": ASSISTANT}
LISTS = ("conversations", "messages")
ANSWERS = ("chosen", "response", "completion")
ALPACA = ("instruction", "input", "output")
CHAT_KEYS = (*LISTS, "prompt", *ANSWERS, *ALPACA, SYSTEM)
REASONING = "reasoning_content"
MASKS = ("weight", "loss", "train")  # 0 or false in a message: it does not count in the loss
OF_PART = ("type", "text")  # keys of a part of a content that are read
EMPTY = (None, "", "[]", "{}", [], {})  # values of keys that a file has but does not use
# Keys that change what other programs train on: tools, media, more turns and texts, masks.
REFUSED = {
    *("tools", "tool_calls", "functions", "function_call"),
    *("image", "images", "audio", "audios", "video", "videos"),
    *("history", "context", "system_prompt", REASONING, "reasoning", "thinking"),
    *("mask", "loss_mask", *MASKS),
}
# Limits of signatures and summaries in the built-in conversations, in characters.
LONGEST_SIGNATURE = 120
SUMMARY_LENGTHS = range(20, 301)


class Turn(NamedTuple):
    """One message of a conversation."""

    role: str  # one of ROLES
    content: str
    has_weight: bool = True  # False: this turn does not count in the loss

    @property
    def counts(self) -> bool:
        """True if this turn is an answer that counts in the loss."""
        return self.role == ASSISTANT and self.has_weight


def conversation_records(files: list[str]) -> Iterator[Record]:
    """Yield each conversation of each file, as JSON. Raises UsageError if a file is unreadable."""
    is_builtin = suffix_of(files[0]) == ".py"
    return _about_docstrings(files) if is_builtin else read_records(files, CHAT_KEYS)


def parse_conversation(value: dict, where: str) -> tuple[list[Turn], set[str]]:
    """Return the turns of a conversation, and the names of its keys that are not read. Raises
    UsageError, which begins with `where`, if the format is unsupported, `check_turns` refuses the
    turns, an answer is empty, no answer counts in the loss, or a key is in REFUSED."""
    turns = [Turn(SYSTEM, value[SYSTEM])] if value.get(SYSTEM) else []
    try:
        messages, read = _messages(value, where)
        unread = _unread(value, (*read, SYSTEM), where)
        for said in messages:
            turn, keys = _turn(said)
            turns.append(turn)
            unread |= _unread(said, keys, where)
            content = said[keys[1]]
            for part in content if isinstance(content, list) else ():
                unread |= _unread(part, OF_PART, where) if isinstance(part, dict) else set()
    except (TypeError, KeyError, AttributeError) as error:
        form = 'a list of {"role", "content"} or {"from", "value"}, perhaps with "weight": 0 or 1'
        raise UsageError(f"{where}: expected {form}") from error
    check_turns(turns, where)
    for number, turn in enumerate(turns, 1):
        if turn.role == ASSISTANT and not turn.content.strip():
            raise UsageError(f"{where}: turn {number} is an empty answer")
    if not any(turn.counts for turn in turns):
        raise UsageError(f"{where}: no answer of the assistant counts in the loss")
    return turns, unread


def _unread(held: dict, read: tuple[str, ...], where: str) -> set[str]:
    """Return the keys of `held` that have a value and are not in `read`. Raises UsageError if one
    of them is in REFUSED."""
    unread = {key for key, value in held.items() if key not in read and value not in EMPTY}
    # In TRL's KTO, a model should not learn an answer with the label false.
    bad_label = {"label"} if held.get("label") is False else set()
    for key in sorted(unread & (REFUSED | bad_label)):
        remedy = "remove it or rename it (docs/fine-tuning.md lists the keys)"
        raise UsageError(f'{where}: "{key}" is not supported: {remedy}')
    return unread


def check_turns(turns: Iterable[Turn], where: str) -> None:
    """Raise UsageError for roles in a wrong order, or a content that is not text. User and
    assistant alternate. The first turn may have the role "system"."""
    expected = (SYSTEM, USER)
    for number, (role, content, _) in enumerate(turns, 1):
        place = f"{where}: turn {number}"
        if role not in expected:
            known = " or ".join(expected)
            raise UsageError(f"{place} has the role {_shown(role)} instead of {known}")
        if not is_text(content):
            raise UsageError(f"{place} has {_shown(content)} instead of a text")
        expected = (ASSISTANT,) if role == USER else (USER,)


def encode_conversation(
    tokenizer: Tokenizer, turns: Iterable[Turn], where: str = ""
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids, and the first and the end position of each answer that counts in the loss; an
    answer includes its </s>. With `where`, raise UsageError, which begins with `where`, if the
    tokenizer changes a turn."""
    turns = list(turns)
    texts = [f"{turn.role}\n{turn.content}" for turn in turns]
    prompt, line_end, *encoded = tokenizer.encode_batch([f"{ASSISTANT}\n", "\n", *texts])
    ids, answers = [], []
    for turn, said, text in zip(turns, texts, encoded, strict=True):
        if where and (change := tokenizer.change(said, text)):
            raise UsageError(f"{where}: {change}")
        ids += [tokenizer.bos_id, *text, tokenizer.eos_id]
        if turn.counts:
            # A piece that holds the line end after the role and the start of the answer counts.
            shared = takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False))
            answers.append((len(ids) - 1 - len(text) + len(list(shared)), len(ids)))
        ids += line_end
    return ids, answers


def text_of(content: object) -> object:
    """Join a list of text parts, or return its first part that is not text. Keep other values."""
    with suppress(TypeError, KeyError):
        if isinstance(content, list):
            others = [part for part in content if part["type"] != "text"]
            return others[0] if others else "".join(part["text"] for part in content)
    return content


def _shown(value: object) -> str:
    return textwrap.shorten(repr(value), 40)


def _messages(value: dict, where: str) -> tuple[list[dict], tuple[str, ...]]:
    """Return a conversation as a list of messages, and the keys that hold them."""
    # A Parquet row has null in the columns that it does not use.
    given = {key: value[key] for key in CHAT_KEYS if value.get(key) is not None}
    for key in LISTS:
        if key in given:
            return given[key], (key,)
    read = ("prompt", next((key for key in ANSWERS if key in given), ""))
    prompt, answer = map(given.get, read)
    if "prompt" in given and isinstance(answer, list):
        return [said | {"weight": 0} for said in prompt] + answer, read
    if isinstance(prompt, str) and isinstance(answer, str):
        return _messages_of_prompt(prompt, answer), read
    texts = [given.get(key, "") for key in ALPACA]
    if {"instruction", "output"} <= {*given} and all(isinstance(text, str) for text in texts):
        question = "\n\n".join(text for text in texts[:2] if text)
        return _pair(question, texts[2]), ALPACA
    expected = (
        'expected "conversations", or "messages", or "prompt" and "completion", "chosen" or '
        '"response", or texts in "instruction" and "output"'
    )
    raise UsageError(f"{where}: no conversation: {expected}")


def _pair(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": USER, "content": question}, {"role": ASSISTANT, "content": answer}]


def _messages_of_prompt(prompt: str, answer: str) -> list[dict[str, str]]:
    if not prompt.startswith("\n\nHuman:"):
        return _pair(prompt, answer)
    _, *parts = re.split(r"\n\n(Human|Assistant):", prompt)  # "Human", its text, "Assistant", ...
    # In rm-static a prompt ends with "Assistant:"; the answer is in another field.
    if parts[-2] == "Assistant" and not parts[-1].strip():
        parts = parts[:-2]
    said = zip([*parts[::2], ASSISTANT], [*parts[1::2], answer], strict=True)
    return [{"from": speaker.lower(), "value": text.strip()} for speaker, text in said]


def _turn(said: dict) -> tuple[Turn, tuple[str, ...]]:
    """Return the turn of a message, and the keys that were read: of the role, of the content, and
    others. Raises TypeError, KeyError or AttributeError if this is no message."""
    # In a Parquet file with both formats, the keys of the unused format are null.
    names = ("role", "content") if said.get("from") is None else ("from", "value")
    role, content = said[names[0]], text_of(said[names[1]])
    role, keys, weights = SHAREGPT.get(role, role), (*names, *MASKS), [*map(said.get, MASKS)]
    if any(weight not in (None, 0, 1) for weight in weights):
        raise TypeError("a weight that is not 0 or 1")
    if role == ASSISTANT and is_text(said.get(REASONING)):
        keys += (REASONING,)
        thought = said[REASONING].strip("\n")
        if thought and is_text(content) and content.strip():
            content = f"<think>\n{thought}\n</think>\n\n" + content.lstrip("\n")
    return Turn(role, content, 0 not in weights), keys


def _about_docstrings(files: list[str]) -> Iterator[Record]:
    """Yield questions about public functions, methods and classes with a short summary. The answer
    is the signature or the summary. Each of the two appears in one question only: a question in one
    split must not reveal an answer in the other split."""
    seen = set()
    for path in files:
        relative = os.path.relpath(path, sysconfig.get_path("stdlib")).removesuffix(".py")
        module = relative.replace(os.sep, ".").removesuffix(".__init__")
        if any(part.startswith("_") for part in module.split(".")):
            continue
        try:
            tree = ast.parse(Path(path).read_bytes())
        except (SyntaxError, ValueError):  # some files are invalid on purpose
            continue
        for what, signature, summary in _documented(tree, module, "function"):
            if signature in seen or summary in seen:
                continue
            seen |= {signature, summary}
            if zlib.crc32(signature.encode()) % 2:
                question, answer = f"What does `{signature}` do?", summary
            else:
                question, answer = f"Which {what} does this: {summary}", f"`{signature}`"
            value = {"prompt": question, "response": answer}
            yield Record(path, path, json.dumps(value).encode())


def _documented(node: ast.AST, name: str, what: str) -> Iterator[tuple[str, str, str]]:
    """Yield (what, signature, summary) of public definitions with a short summary. `what` is
    "function", "method" or "class"; a signature is like "shutil.which(cmd, path=None)"."""
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
            yield "class" if is_class else what, signature, summary
        if is_class:
            yield from _documented(item, f"{name}.{item.name}", "method")
