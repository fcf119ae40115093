"""Questions and answers made from the docstrings of Python's standard library, which is there
wherever Python is.

Each public function, method and class with a docstring is asked about once, either by its signature
or by its summary. With both, an answer held out for validation could be learned from the other.
"""

import ast
import json
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator

from data.corpus import Record

LONGEST_SIGNATURE = 120  # in characters, as the next two are
SHORTEST_SUMMARY, LONGEST_SUMMARY = 20, 300


def docstring_records(files: Iterable[str]) -> Iterator[Record]:
    """Yield one conversation for everything documented in these files of Python source, in their
    order, unless its signature or its summary came before."""
    seen = set()
    for path in files:
        relative = os.path.relpath(path, sysconfig.get_path("stdlib"))
        module = relative.removesuffix(".py").replace(os.sep, ".").removesuffix(".__init__")
        try:
            with open(path, "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some files misspell escape sequences
                tree = ast.parse(file.read())
        except (SyntaxError, ValueError):  # some files hold a mistake on purpose
            continue
        if any(part.startswith("_") for part in module.split(".")):
            continue
        for line, kind, signature, summary in _inside(tree, module, "function"):
            if signature in seen or summary in seen:
                continue
            seen |= {signature, summary}
            if zlib.crc32(signature.encode()) % 2:
                question, answer = f"What does `{signature}` do?", summary
            else:
                question, answer = f"Which {kind} does this: {summary}", f"`{signature}`"
            raw = json.dumps({"prompt": question, "response": answer}).encode()
            yield Record(path, line, raw)


def _inside(node: ast.AST, name: str, kind: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield the public definitions of a module or class: line, "function", "method" or "class",
    a signature as in "shutil.which(cmd, path=None)", and a summary.

    Definitions under an `if` are for some systems only, and left out.
    """
    for item in node.body:
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if item.name.startswith("_"):
            continue
        is_class = isinstance(item, ast.ClassDef)
        arguments = "" if is_class else f"({ast.unparse(item.args)})"
        signature = f"{name}.{item.name}{arguments}"
        # The first paragraph, unless it is the signature once more.
        summary = " ".join((ast.get_docstring(item) or "").split("\n\n")[0].split())
        is_answer = SHORTEST_SUMMARY <= len(summary) <= LONGEST_SUMMARY
        is_answer &= not summary.startswith(f"{item.name}(")
        if is_answer and len(signature) <= LONGEST_SIGNATURE:
            yield item.lineno, "class" if is_class else kind, signature, summary
        if is_class:
            yield from _inside(item, f"{name}.{item.name}", "method")
