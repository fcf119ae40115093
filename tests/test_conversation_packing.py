import json
from pathlib import Path

import conftest
import numpy as np
import pytest

from lm.data import encoding
from lm.data.conversations import ASSISTANT, Turn, encode_conversation
from lm.data.shards import read_description
from lm.data.tokenizer import Tokenizer


def conversation(i: int) -> list[Turn]:
    """Return conversation number i, with one or two questions. All conversations differ."""
    turns = [Turn("user", f"1 + {i}?"), Turn("assistant", f"{1 + i}")]
    if i % 2:
        turns = [Turn("system", "Add."), *turns]
    if i % 3:
        turns += [Turn("user", f"{i} + {i}?\n"), Turn("assistant", f" {i} 第 {2 * i}" * (i % 7))]
    return turns[: -2 if not turns[-1].content else None]


CONVERSATIONS = [conversation(i) for i in range(300)]


def write(path: Path, conversations=CONVERSATIONS) -> Path:
    rows = ([{"role": turn.role, "content": turn.content} for turn in x] for x in conversations)
    lines = [json.dumps({"messages": turns}) + "\n" for turns in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def pack(packed, tmp_path):
    """Prepares a file of conversations with the small corpus's tokenizer; returns the folder."""
    how = {"kind": "conversations", "vocab_size": None, "tokenizer": f"{packed}/tokenizer.model"}
    return lambda path, name, **changes: conftest.pack(path, tmp_path / name, **how | changes)


def stored(folder: Path, split: str) -> list[tuple[list[int], list[list[int]]]]:
    """Return the ids of each conversation of a split, and of its answers. numpy reads the files, so
    a fault of this project's reader cannot hide."""
    part = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))["splits"][split]
    if not part["tokens"]:
        return []
    tokens = np.concatenate([np.fromfile(folder / s["file"], "<u2") for s in part["shards"]])
    found = {}
    for start, begin, end in np.fromfile(folder / part["answers"]["file"], "<i8").reshape(-1, 3):
        found.setdefault(int(start), []).append((int(begin), int(end)))
    return [
        (tokens[start : spans[-1][1]].tolist(), [tokens[a:b].tolist() for a, b in spans])
        for start, spans in found.items()
    ]


def expected(tokenizer: Tokenizer, turns: list[Turn]) -> tuple[list[int], list[list[int]]]:
    """Return the ids that `stored` should return for a conversation of these turns."""
    ids, answers = encode_conversation(tokenizer, turns)
    return ids[: answers[-1][1]], [ids[begin:end] for begin, end in answers]


def test_every_conversation_is_stored_once_in_order_with_its_answers(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_BYTES", 2000)
    # A last question without an answer is not stored.
    longer = [[*turns, Turn("user", "And?")] for turns in CONVERSATIONS]
    folder = pack(write(tmp_path / "a.jsonl", longer), "longer", val_fraction=0, workers=2)
    tokenizer, description = Tokenizer(folder / "tokenizer.model"), read_description(folder)
    assert stored(folder, "train") == [expected(tokenizer, turns) for turns in CONVERSATIONS]
    assert stored(folder, "val") == []
    part, found = description["splits"]["train"], stored(folder, "train")
    answers = [ids for _, some in found for ids in some]
    assert description["kind"] == "conversations"
    assert (part["documents"], part["tokens"]) == (300, sum(len(ids) for ids, _ in found))
    assert part["answers"]["count"] == len(answers)
    assert part["answers"]["tokens"] == sum(map(len, answers))
    said = [t.content for turns in CONVERSATIONS for t in turns if t.role == ASSISTANT]
    assert part["bytes"] == sum(len(text.encode()) for text in said)


def test_answers_with_weight_0_do_not_change_the_split(pack, tmp_path):
    """Only the last answer of each conversation keeps its weight."""
    path = write(tmp_path / "a.jsonl")
    role, lines = '"role": "assistant"', path.read_text().splitlines()
    fewer = [line.replace(role, f'"weight": 0, {role}', line.count(role) - 1) for line in lines]
    (tmp_path / "b.jsonl").write_text("\n".join(fewer))
    folders = pack(path, "all"), pack(tmp_path / "b.jsonl", "fewer")
    for split, n in (("train", 270), ("val", 30)):
        before, after = ([ids for ids, _ in stored(folder, split)] for folder in folders)
        assert before == after
        assert len(after) == pytest.approx(n, abs=15)
