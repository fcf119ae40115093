import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import error_of

from lm.common.errors import UsageError
from lm.data import conversations
from lm.data.conversations import CHAT_SUFFIXES, Turn, conversation_records, parse_conversation
from lm.data.corpus import find_files, load_json

PLACE = "chat.jsonl, line 7"
TURNS = [Turn("system", "Be brief."), Turn("user", " 1 + 1?\n"), Turn("assistant", " 2 ")]
DICTS = [{"role": turn.role, "content": turn.content} for turn in TURNS]
BRIEF, ASK, ANSWER = DICTS
ASKED, ANSWERED = TURNS[1:]
RM_STATIC = "\n\nHuman: Hi there\n\nAssistant: Hello.\nYes?\n\nHuman: 1 + 1?\n\nAssistant:"
OF_RM_STATIC = [
    *(Turn("user", "Hi there"), Turn("assistant", "Hello.\nYes?")),
    *(Turn("user", "1 + 1?"), Turn("assistant", "2")),
]
ADDITION = [Turn("user", "Add 1\n\n1"), Turn("assistant", "2")]
SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt"}
FROM_VALUE = [{"from": SHAREGPT[turn.role], "value": turn.content} for turn in TURNS]
PARTS = [{"type": "text", "text": " 1 + "}, {"type": "text", "text": "1?\n", "index": None}]
UNCOUNTED = ANSWERED._replace(has_weight=False)
MASKED = [
    *(ASK | {"train": True}, ANSWER | {"loss": False, "name": "bot"}),
    *(ASK, ANSWER | {"train": False, "weight": None}, ASK, ANSWER | {"weight": 0}),
    *(ASK | {"id": 7}, ANSWER | {"loss": True, "train": True, "weight": 1.0}),
]
REASONED = Turn("assistant", "<think>\n1 + 1\nis 2\n</think>\n\n 2 ")
FORMS = {
    "MiniMind": ({"conversations": DICTS}, TURNS),
    "OpenAI": ({"messages": DICTS, "prompt": "1 + 1?", "chosen": DICTS}, TURNS),
    "ShareGPT": ({"id": "QWJhYvA_0", "conversations": FROM_VALUE}, TURNS),
    "two forms in one table": ([turn | {"from": None, "value": None} for turn in DICTS], TURNS),
    "system beside the list": ({"system": "Be brief.", "conversations": FROM_VALUE[1:]}, TURNS),
    "parts of a content": ([BRIEF, ASK | {"content": PARTS}, ANSWER | {"name": "bot"}], TURNS),
    "TRL's lists, with an answer in the prompt": (
        {"prompt": [*DICTS, ASK], "completion": [ANSWER], "chat_template_kwargs": {}},
        [*(turn._replace(has_weight=False) for turn in [*TURNS, ASKED]), ANSWERED],
    ),
    "TRL's texts": ({"prompt": "Add 1\n\n1", "completion": "2"}, ADDITION),
    "masks": (MASKED, [*(ASKED, UNCOUNTED) * 3, ASKED, ANSWERED]),
    "reasoning": ([ASK, ANSWER | {"reasoning_content": "\n1 + 1\nis 2\n"}], [ASKED, REASONED]),
    "a prompt": ({"prompt": " 1 + 1?\n", "response": " 2 "}, [ASKED, ANSWERED]),
    "rm-static": ({"prompt": RM_STATIC, "response": " 3", "chosen": " 2"}, OF_RM_STATIC),
    "Alpaca": ({"instruction": "Add 1", "input": "1", "output": "2", "history": []}, ADDITION),
    "Alpaca without input": ({"instruction": "Add 1\n\n1", "input": "", "output": "2"}, ADDITION),
}


@pytest.mark.parametrize(("value", "turns"), FORMS.values(), ids=FORMS)
def test_the_keys_of_a_conversation_decide_its_form(value, turns):
    value = {"messages": value} if isinstance(value, list) else value
    assert parse_conversation(value, PLACE)[0] == turns


def test_keys_that_are_not_read_are_returned_unless_they_are_empty():
    said = ANSWER | {"name": "bot", "content": [PARTS[0] | {"index": 0}], "draft": "maybe 3"}
    empty = {"tools": "[]", "history": [], "functions": None}
    row = {"messages": [ASK, said], "label": True, "toxic": False, **empty}
    assert parse_conversation(row, PLACE)[1] == {"name", "index", "draft", "label", "toxic"}
    pairs = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER], "response": "5", "input": 1}
    assert parse_conversation(pairs, PLACE)[1] == {"rejected", "response", "input"}


PAIR = {"prompt": "1 + 1?", "completion": "2"}
REASON, TRAIN = '"reasoning_content" is not supported', '"train" is not supported: remove it'
WRONG = {
    "reasoning of a user": ([ASK | {"reasoning_content": "why"}, ANSWER], REASON),
    "reasoning that is no text": ([ASK, ANSWER | {"reasoning_content": {"a": 1}}], REASON),
    "a mask in a part": ([ASK, ANSWER | {"content": [PARTS[0] | {"train": False}]}], TRAIN),
    "a mask of the row": (PAIR | {"train": False}, TRAIN),
    "an answer that TRL's KTO calls bad": (PAIR | {"label": False}, '"label" is not supported'),
    "two system messages": ({"system": "be brief", "messages": DICTS}, "turn 2 has the role"),
    "none of the forms": ({"text": "a"}, '"prompt" and "completion", "chosen" or "response"'),
    "no list": ({"messages": "hello"}, "expected a list of {"),
    "other keys": ([{"speaker": "gpt", "text": "a"}], 'a list of {"role", "content"} or {"from"'),
    "ShareGPT that begins with an answer": (
        {"conversations": FROM_VALUE[2:]},
        "turn 1 has the role 'assistant' instead of system or user",
    ),
    "an unknown role": ([ASK, ANSWER | {"role": "robot"}], "the role 'robot' instead of assistant"),
    "a role that is a list": ([{"role": [], "content": ""}], "expected a list of"),
    "a weight of a half": ([ASK | {"weight": 0.5}], '"weight": 0 or 1'),
    "no answer that counts": ([ASK, ANSWER | {"weight": 0}], "no answer of the assistant counts"),
    "an empty answer": ({"prompt": "a", "response": " \n"}, "turn 2 is an empty answer"),
    "a picture": ([ASK | {"content": [*PARTS, {"type": "image"}]}], "turn 1 has {'type': 'image'}"),
    "half a character": ({"prompt": "a", "response": "\ud83d"}, "turn 2 has '\\ud83d' instead"),
    "a prompt of messages": ({"prompt": DICTS, "chosen": "b"}, "or texts in"),
}


@pytest.mark.parametrize(("value", "reason"), WRONG.values(), ids=WRONG)
def test_an_invalid_conversation_is_refused_in_one_line_with_its_place(value, reason):
    value = {"messages": value} if isinstance(value, list) else value
    line = error_of(parse_conversation, value, PLACE)
    assert line.startswith(f"{PLACE}: ")
    assert reason in line


def read(path: Path | str) -> list[tuple[str, list[Turn]]]:
    """Return the place of every conversation, relative to `path`, and its turns."""
    records = conversation_records(find_files(str(path), CHAT_SUFFIXES))
    parsed = ((each.place, parse_conversation(load_json(each), each.place)[0]) for each in records)
    return [(place.removeprefix(f"{path}/"), turns) for place, turns in parsed]


def test_jsonl_zst_and_parquet_files_of_a_folder_are_read_and_others_ignored(tmp_path):
    line = json.dumps({"messages": DICTS}).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\n\n" + line)
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(line))
    (tmp_path / "b2.json").write_text(json.dumps([{"messages": DICTS}] * 2, indent=2))
    columns = {"id": [1, 2], "conversations": [DICTS, DICTS]}
    pq.write_table(pa.table(columns), tmp_path / "c.parquet")
    columns = {"instruction": ["Add 1\n\n1"], "input": [None], "output": ["2"]}
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    (tmp_path / "e.txt").write_text("not one")
    (tmp_path / "f.csv").write_text("not,one")
    places = ["a.jsonl, line 1", "a.jsonl, line 3", "b.jsonl.zst, line 1"]
    places += ["b2.json, element 1", "b2.json, element 2"]
    places += ["c.parquet, row 1", "c.parquet, row 2"]
    assert read(tmp_path) == [*((place, TURNS) for place in places), ("d.parquet, row 1", ADDITION)]


def test_tables_and_files_without_conversations_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(UsageError, match=r"no column 'conversations' or 'messages'.*it has 'text'"):
        read(tmp_path)
    pq.write_table(pa.table({"messages": [DICTS, None]}), path)
    assert "a.parquet, row 2: no conversation" in error_of(read, tmp_path)
    pq.write_table(pa.table({"messages": [DICTS], "tools": ["[{}]"]}), path)
    assert 'a.parquet, row 1: "tools" is not supported' in error_of(read, tmp_path)
    path.rename(tmp_path / "a.txt")
    assert ".json.zst, .parquet" in error_of(read, tmp_path)


SOURCE = """
def public(a, *, b=1):
    '''Do something that is worth a name.

    And this is about how.
    '''
async def waits():
    '''Wait for something
    on two lines.'''
def _private():
    '''Nobody asks about what is private.'''
def repeats(a):
    '''repeats(a) -> whatever it was'''
def short():
    '''Too short.'''
class Box:
    '''Hold other things in some order.'''
    def open(self):
        '''Open the box and look inside.'''
def twin():
    '''Do something that is worth a name.'''
"""


def test_the_builtin_conversations_ask_once_about_each_suitable_docstring(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(SOURCE)
    (tmp_path / "_hidden.py").write_text(SOURCE.replace("Box", "HiddenBox"))
    (tmp_path / "broken.py").write_text("def f(:\n")
    found = [turns for _, turns in read("builtin")]
    assert all([turn.role for turn in turns] == ["user", "assistant"] for turns in found)
    asked = {(question.content, answer.content) for question, answer in found}
    assert len(asked) == 4
    for kind, signature, summary in (
        ("function", "package.public(a, *, b=1)", "Do something that is worth a name."),
        ("function", "package.waits()", "Wait for something on two lines."),
        ("class", "package.Box", "Hold other things in some order."),
        ("method", "package.Box.open(self)", "Open the box and look inside."),
    ):
        of_summary = (f"What does `{signature}` do?", summary)
        of_signature = (f"Which {kind} does this: {summary}", f"`{signature}`")
        assert len(asked & {of_summary, of_signature}) == 1
