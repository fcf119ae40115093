import json
import math
import sys

import pytest
import torch
from torch.nn.functional import one_hot

from benchmarks import head_to_head
from benchmarks.head_to_head import (
    affordable_steps,
    bits_per_byte,
    parse_options,
    race,
    require_checkouts,
    split,
)
from benchmarks.racers import Contender, Reader, write_jsonl
from common.errors import UsageError


def bytes_reader(certain: bool) -> Reader:
    """Reads bytes; knows nothing, or that every byte is followed by the next number."""

    def logits(ids):
        following = one_hot((ids + 1) % 256, 257).float()
        return following * 1e4 if certain else torch.zeros(1, ids.shape[1], 256)

    return Reader(logits, lambda text: list(text.encode()), start=96, context=4)


def test_who_knows_nothing_of_bytes_needs_eight_bits_for_each():
    assert bits_per_byte(bytes_reader(certain=False), ["abc", "月亮在"]) == pytest.approx(8)


def test_who_knows_the_text_needs_none_however_long_it_is():
    text = bytes(range(97, 123)).decode()  # longer than the context
    assert bits_per_byte(bytes_reader(certain=True), [text, "abc"]) == pytest.approx(0)


def test_every_eleventh_document_is_held_out(tmp_path):
    texts = [f"document {i}\u2028" for i in range(1, 23)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    train, held_out = split(tmp_path / "a.jsonl")
    assert held_out == [texts[10], texts[21]]
    assert train == [text for text in texts if text not in held_out]


@pytest.mark.parametrize("text", ["", "no json\n", '{"words": "x"}\n', '{"text": "too few"}\n'])
def test_text_that_is_none_is_an_error(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UsageError):
        split(tmp_path / "a.jsonl")


@pytest.mark.parametrize("flag", ["--minimind", "--nanogpt"])
def test_a_folder_that_is_no_checkout_is_an_error(tmp_path, flag):
    args = parse_options(["--data", "x.jsonl", flag, str(tmp_path)])
    with pytest.raises(UsageError, match="has no"):
        require_checkouts(args)


@pytest.fixture
def saver(tmp_path, monkeypatch) -> Contender:
    """Saves the number of each of its steps into one file, over and over."""
    monkeypatch.setattr(head_to_head, "OUT", tmp_path)
    monkeypatch.setattr(head_to_head, "POLL_SECONDS", 0.01)
    (tmp_path / "saver").mkdir()
    code = (
        "import sys, time, pathlib\n"
        "for step in range(int(sys.argv[1])):\n"
        "    pathlib.Path('weights.bin').write_text(str(step)); time.sleep(0.2)"
    )

    def command(steps: int) -> list[str]:
        return [sys.executable, "-c", code, str(steps)]

    return Contender("saver", tmp_path / "saver", command, "weights.bin", read=lambda path: None)


def test_what_was_saved_is_kept_and_dated_from_the_command_on(saver, monkeypatch, tmp_path):
    monkeypatch.setattr(head_to_head.time, "time", lambda: 1000.0)
    code = (
        "import os, pathlib\n"
        "pathlib.Path('weights.bin').write_text('3'); os.utime('weights.bin', (1007, 1007))"
    )
    saver.command = lambda steps: [sys.executable, "-c", code]
    _, saves = race(saver, steps=4, limit=math.inf)
    assert saves == [(7.0, tmp_path / "saver-0.bin")]
    assert saves[0][1].read_text() == "3"


def test_who_runs_over_the_time_is_ended_and_its_last_save_counts(saver, tmp_path, monkeypatch):
    first_copy = tmp_path / "saver-0.bin"
    monkeypatch.setattr(head_to_head.time, "monotonic", lambda: 9.0 if first_copy.exists() else 0.0)
    _, saves = race(saver, steps=10_000, limit=5)
    assert int(saves[-1][1].read_text()) < 9_999


def test_who_fails_is_named(saver):
    saver.command = lambda steps: [sys.executable, "-c", "raise SystemExit('out of luck')"]
    with pytest.raises(UsageError, match=r"saver failed: out of luck"):
        race(saver, steps=1, limit=math.inf)


def test_who_saves_nothing_is_named(saver):
    saver.command = lambda steps: [sys.executable, "-c", "pass"]
    with pytest.raises(UsageError, match="saved no weights"):
        race(saver, steps=1, limit=math.inf)


def test_the_steps_are_as_many_as_the_time_allows(monkeypatch):
    monkeypatch.setattr(head_to_head, "race", lambda _, steps, limit: (5 + 0.5 * steps, []))
    assert affordable_steps(None, seconds=100) == 180  # (97 - 5) / 0.5, in tens


def test_rows_are_read_as_json(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["月"])
    assert json.loads((tmp_path / "a.jsonl").read_text("utf-8")) == {"text": "月"}
