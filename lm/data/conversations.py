"""Read conversations in the formats of other projects.

Each conversation is one JSON object. Its keys determine the format:

    {"messages": [{"role": "user", "content": "…"}, …]}         OpenAI
    {"conversations": [{"role": "user", "content": "…"}, …]}    MiniMind
    {"conversations": [{"from": "human", "value": "…"}, …]}     ShareGPT
    {"prompt": "…", "completion": "…"}                          TRL; two texts or two lists
    {"prompt": "…", "chosen": "…"}, {"prompt", "response"}      DeepSpeed-Chat (Dahoas/rm-static)
    {"instruction": "…", "input": "…", "output": "…"}           Alpaca; input may be missing

In every format, "system" may hold the system message. Answers with "weight": 0, "loss": false or
"train": false, and answers in a list under "prompt", do not count in the loss. The
"reasoning_content" of an answer stands inside <think> before it, as in MiniMind's template. A
content may be a list of parts {"type": "text", "text": "…"}. A prompt that begins with
"\\n\\nHuman:" holds several turns, as in Dahoas/rm-static. "rejected" is not used. Other keys that
may hold text or a mask are refused. The built-in conversations are made from the docstrings of
Python's standard library.
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
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import UsageError
from lm.common.parser import is_text
from lm.data.corpus import JSON, Record, advice_for_list, parquet_rows, read_records, suffix_of

SUFFIXES = (*JSON, ".parquet")
ROLES = SYSTEM, USER, ASSISTANT = ("system", "user", "assistant")
SHAREGPT = {"human": USER, "gpt": ASSISTANT}
TOOLS = ("tool", "function", "function_call", "observation")
LISTS = ("conversations", "messages")
ANSWERS = ("chosen", "response", "completion")
ALPACA = ("instruction", "input", "output")
KEYS = (*LISTS, "prompt", *ANSWERS, *ALPACA, SYSTEM)
MASKS = ("weight", "loss", "train")  # 0 or false in a message: it does not count in the loss
OF_MESSAGE = ("role", "content", "from", "value", "reasoning_content", *MASKS)
OF_PART = ("type", "text")  # keys of a part of a content
EMPTY = (None, "", "[]", "{}", [], {})  # values of keys that a file has but does not use
# Words in the names of keys that hold a mask, that hold text, and that only describe a message.
MASK_WORDS = "ignore loss mask masked masks train trainable training weight weights".split()  # noqa: SIM905
TEXT_WORDS = (  # noqa: SIM905
    "audio audios context cot function functions history image images kwargs rationale reasoning "
    "system think thinking thought thoughts tool tools video videos"
).split()
ABOUT_WORDS = (  # noqa: SIM905
    "annotations category created date hash id ids index label labels lang language model name "
    "rating score source status tag tags time timestamp topic type url"
).split()
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
    if suffix_of(files[0]) == ".py":
        yield from _about_docstrings(files)
        return
    for path in files:
        if suffix_of(path) == ".parquet":
            for number, row in enumerate(parquet_rows(path, KEYS, others=True), 1):
                yield Record(path, number, json.dumps(row, default=str).encode(), unit="row")
        else:
            yield from read_records([path])


def parse_conversation(value: dict, where: str) -> list[Turn]:
    """Return the turns of a conversation. Raises UsageError, which begins with `where`, if the
    format is unsupported, `check_turns` refuses the turns, an answer is empty, no answer counts in
    the loss, or another key may hold a mask, or text that the turns do not hold."""
    turns, used = _turns(value, where)
    if value.get(SYSTEM):
        turns = [Turn(SYSTEM, value[SYSTEM]), *turns]
    check_turns(turns, where)
    for number, turn in enumerate(turns, 1):
        if turn.role == ASSISTANT and not turn.content.strip():
            raise UsageError(f"{where}: turn {number} is an empty answer")
    if not any(turn.counts for turn in turns):
        raise UsageError(f"{where}: no answer of the assistant counts in the loss")
    read = {key: value[key] for key in (*used, SYSTEM) if key in value}
    for key, other in value.items():
        if key not in read and matters(key, other) and not _is_copy(other, read, turns):
            raise not_understood(key, where)
    return turns


def words_of(key: str) -> set[str]:
    """Split the name of a key: "train_on" and "trainOn" have the words "train" and "on"."""
    return {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", key)}


def matters(key: str, value: object) -> bool:
    """Return True if a key of a conversation or message may hold text or a mask."""
    words, is_number = words_of(key), isinstance(value, int | float)
    if key == "label":
        return value in (
            False,
            "False",
            "false",
        )  # in TRL's KTO: the model should not learn this answer
    holds_text = (key in KEYS or words.intersection(TEXT_WORDS)) and not is_number
    return value not in EMPTY and bool(words.intersection(MASK_WORDS) or holds_text)


def not_understood(key: str, where: str) -> UsageError:
    """Return the error for a key that may hold text or a mask, and is not understood."""
    remedy = "remove it or rename it (docs/fine-tuning.md lists the keys)"
    return UsageError(f'{where}: "{key}" is not understood: {remedy}')


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


def text_of(content: object) -> object:
    """Join a list of text parts, or return its first part that is not text. Keep other values."""
    with suppress(TypeError, KeyError):
        if isinstance(content, list):
            others = [part for part in content if part["type"] != "text"]
            return others[0] if others else "".join(part["text"] for part in content)
    return content


def _shown(value: object) -> str:
    return textwrap.shorten(repr(value), 40)


def _turns(value: dict, where: str) -> tuple[list[Turn], tuple[str, ...]]:
    """Return the turns without the system message, and the keys that are read or left out."""
    # A Parquet row has null in the columns that it does not use.
    given = {key: value[key] for key in KEYS if value.get(key) is not None}
    for key in LISTS:
        if key in given:
            return _listed_turns(given[key], where), (key,)
    answers = [given[key] for key in ANSWERS if key in given]
    if "prompt" in given and answers and isinstance(answers[0], list):
        prompt = [turn._replace(has_weight=False) for turn in _listed_turns(given["prompt"], where)]
        return prompt + _listed_turns(answers[0], where), ("prompt", *ANSWERS)
    if all(isinstance(text, str) for text in given.values()):
        if "prompt" in given and answers:
            return _turns_of_prompt(given["prompt"], answers[0]), ("prompt", *ANSWERS)
        if "instruction" in given and "output" in given:
            parts = (given["instruction"], given.get("input"))
            question = "\n\n".join(part for part in parts if part)
            return [Turn(USER, question), Turn(ASSISTANT, given["output"])], ALPACA
    expected = (
        'expected "conversations", or "messages", or "prompt" and "completion", "chosen" or '
        '"response", or texts in "instruction" and "output"'
    )
    others = {key: held for key, held in value.items() if key not in KEYS}
    raise UsageError(f"{where}: no conversation: {advice_for_list(others) or expected}")


def _listed_turns(turns: object, where: str) -> list[Turn]:
    with suppress(TypeError, KeyError, AttributeError):
        if all(turn.get(mask) in (None, 0, 1) for turn in turns for mask in MASKS):
            return [_turn(turn, f"{where}: turn {i}") for i, turn in enumerate(turns, 1)]
    form = 'a list of {"role", "content"} or {"from", "value"}, perhaps with "weight": 0 or 1'
    raise UsageError(f"{where}: expected {form}, not {_shown(turns)}")


def _is_copy(other: object, read: dict, turns: list[Turn]) -> bool:
    """Return True for a value that is read under another key, or a text that stands in a turn or
    holds all texts that are read, as Alpaca's "prompt" may."""
    if not isinstance(other, str):
        return other in read.values()
    texts = [text for text in read.values() if isinstance(text, str)]
    holds_all = len(texts) > 1 and all(text.strip() in other for text in texts)
    return holds_all or any(other.strip() in turn.content for turn in turns)


def _turn(said: dict, where: str) -> Turn:
    # In a Parquet file with both formats, the keys of the unused format are null.
    keys = ("role", "content") if said.get("from") is None else ("from", "value")
    role, content = (said[key] for key in keys)
    calls = [said.get("tool_calls"), said.get("function_call")]
    if role in TOOLS or any(call not in EMPTY for call in calls):
        raise UsageError(f"{where}: calls of tools are not supported")
    parts = [part for part in content if type(part) is dict] if isinstance(content, list) else []
    for held, known in ((said, OF_MESSAGE), *((part, OF_PART) for part in parts)):
        _require_read(held, known, where)
    role, content = SHAREGPT.get(role, role), text_of(content)
    if (thought := said.get("reasoning_content")) not in EMPTY:
        if role != ASSISTANT or not is_text(thought):
            raise not_understood("reasoning_content", where)
        if is_text(content) and content.strip() and (thought := thought.strip("\n")):
            content = f"<think>\n{thought}\n</think>\n\n" + content.lstrip("\n")
    return Turn(role, content, all(said.get(mask) != 0 for mask in MASKS))


def _require_read(held: dict, known: tuple[str, ...], where: str) -> None:
    """Raise UsageError for a key of a message that is not in `known`, unless it is empty, a number
    that is no mask, or describes the message."""
    for key, value in held.items():
        describes = words_of(key).intersection(ABOUT_WORDS) or type(value) in (int, float)
        if key not in known and (matters(key, value) or not (value in EMPTY or describes)):
            raise not_understood(key, where)


def _turns_of_prompt(prompt: str, answer: str) -> list[Turn]:
    if not prompt.startswith("\n\nHuman:"):
        return [Turn(USER, prompt), Turn(ASSISTANT, answer)]
    _, *parts = re.split(r"\n\n(Human|Assistant):", prompt)  # "Human", its text, "Assistant", ...
    # In rm-static a prompt ends with "Assistant:"; the answer is in another field.
    if parts[-2] == "Assistant" and not parts[-1].strip():
        parts = parts[:-2]
    roles = {"Human": USER, "Assistant": ASSISTANT}
    pairs = zip(parts[::2], parts[1::2], strict=True)
    turns = [Turn(roles[speaker], text.strip()) for speaker, text in pairs]
    return [*turns, Turn(ASSISTANT, answer.strip())]


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
    """Yield (line, kind, signature, summary) of public definitions with a short summary. A kind is
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
            yield item.lineno, "class" if is_class else kind, signature, summary
        if is_class:
            yield from _documented(item, f"{name}.{item.name}", "method")
