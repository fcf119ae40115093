"""Questions and answers made from the docstrings of Python's standard library: a set of
conversations that is there wherever Python is.

Each public function, method and class that says what it does is asked about once, some by their
signature and some by what they do: never both, or an answer that is held out for validation could
be learned from its counterpart.
"""

import ast
import json
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from data.corpus import Record

LONGEST_SIGNATURE = 120  # in characters, as the next two are
SHORTEST_SUMMARY, LONGEST_SUMMARY = 20, 300


class Documented(NamedTuple):
    line: int  # of its file
    kind: str  # "function", "method" or "class"
    signature: str  # "shutil.which(cmd, mode=os.F_OK | os.X_OK, path=None)"
    summary: str  # the first paragraph of its docstring


def docstring_records(files: Iterable[str]) -> Iterator[Record]:
    """One conversation for everything documented in these files of Python source, in their order;
    what has the signature or the summary of something before it is left out."""
    seen = set()
    for path in files:
        for documented in _documented(path):
            new = {documented.signature, documented.summary}
            if seen & new:
                continue
            seen |= new
            question, answer = _asked(documented)
            raw = json.dumps({"prompt": question, "response": answer}).encode()
            yield Record(path, documented.line, raw)


def _asked(documented: Documented) -> tuple[str, str]:
    """Question and answer."""
    _, kind, signature, summary = documented
    if zlib.crc32(signature.encode()) % 2:
        return f"What does `{signature}` do?", summary
    return f"Which {kind} does this: {summary}", f"`{signature}`"


def _documented(path: str) -> Iterator[Documented]:
    with open(path, "rb") as file:
        source = file.read()
    try:
        with warnings.catch_warnings():  # about escape sequences, which some files misspell
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # some files are there to hold a mistake
        return
    relative = os.path.relpath(path, sysconfig.get_path("stdlib"))
    module = relative.removesuffix(".py").replace(os.sep, ".").removesuffix(".__init__")
    if not any(part.startswith("_") for part in module.split(".")):
        yield from _inside(tree, module, "function")


def _inside(node: ast.AST, name: str, kind: str) -> Iterator[Documented]:
    """What a module or a class defines. (What stands under an `if` is for some systems only.)"""
    for item in node.body:
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if item.name.startswith("_"):
            continue
        if isinstance(item, ast.ClassDef):
            signature, what = f"{name}.{item.name}", "class"
        else:
            signature, what = f"{name}.{item.name}({ast.unparse(item.args)})", kind
        summary = _summary(item)
        if summary and len(signature) <= LONGEST_SIGNATURE:
            yield Documented(item.lineno, what, signature, summary)
        if isinstance(item, ast.ClassDef):
            yield from _inside(item, f"{name}.{item.name}", "method")


def _summary(item: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """The first paragraph of its docstring, on one line; nothing if that is too short or too long
    to be an answer, or its signature once more."""
    summary = " ".join((ast.get_docstring(item) or "").split("\n\n")[0].split())
    is_answer = SHORTEST_SUMMARY <= len(summary) <= LONGEST_SUMMARY
    return summary if is_answer and not summary.startswith(f"{item.name}(") else ""
