import json
from pathlib import Path

import pytest
from data.docstrings import docstring_records

from data import docstrings
from data.conversations import conversation_records, parse_conversation
from data.corpus import find_files, load_json

SOURCE = '''
"""The module's own docstring."""
import os

def public(a, *, b=1):
    """Do something that is worth a name.

    And this is about how.
    """

async def waits():
    """Wait for something
    on two lines."""

def _private():
    """Nobody asks about what is private."""

def silent():
    pass

def repeats(a):
    """repeats(a) -> whatever it was"""

def short():
    """Too short."""

def long():
    """%s"""

class Box:
    """Hold other things in some order."""

    def open(self):
        """Open the box and look inside."""

    def __len__(self):
        """Return the number of things in it."""

def twin():
    """Do something that is worth a name."""
''' % ("word " * 80)


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A standard library of one package and some modules that are not asked about."""
    monkeypatch.setattr(docstrings.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(SOURCE)
    (tmp_path / "_hidden.py").write_text(SOURCE.replace("Box", "HiddenBox"))
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "old.py").write_bytes(b"# coding: nonsense\ndef f(): pass\n")
    return tmp_path


def asked(files) -> dict[str, str]:
    """Question → answer, through the same door as other conversations."""
    turns = [parse_conversation(load_json(r), r.place) for r in conversation_records(files)]
    assert all([turn.role for turn in two] == ["user", "assistant"] for two in turns)
    return {question.content: answer.content for question, answer in turns}


def test_public_things_are_asked_about_once_one_way_or_the_other(library):
    signatures = {
        "package.public(a, *, b=1)": ("function", "Do something that is worth a name."),
        "package.waits()": ("function", "Wait for something on two lines."),
        "package.Box": ("class", "Hold other things in some order."),
        "package.Box.open(self)": ("method", "Open the box and look inside."),
    }
    found = asked(sorted(map(str, library.rglob("*.py"))))
    assert len(found) == len(signatures)
    for signature, (kind, summary) in signatures.items():
        there = found.get(f"What does `{signature}` do?") == summary
        back = found.get(f"Which {kind} does this: {summary}") == f"`{signature}`"
        assert there != back


def test_the_standard_library_has_a_few_thousand_both_ways_and_none_twice():
    files = find_files("builtin")
    records = list(docstring_records(files))
    assert [record.raw for record in records] == [r.raw for r in docstring_records(files)]
    found = [json.loads(record.raw) for record in records]
    assert 3000 < len(found) < 10_000
    there = [turns for turns in found if turns["prompt"].startswith("What does `")]
    assert len(there) == pytest.approx(len(found) / 2, rel=0.1)
    signatures = {turns["prompt"] for turns in there} | {turns["response"] for turns in found}
    assert len(signatures) == len(there) + len(found)  # all answers are different, too
