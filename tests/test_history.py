import json

import pytest

from common.errors import UsageError
from report.history import read_history, series


def write(folder, *lines: str | bytes, name: str = "metrics.jsonl"):
    data = [line if isinstance(line, bytes) else line.encode() for line in lines]
    (folder / name).write_bytes(b"\n".join(data))


def test_rows_are_sorted_by_kind_and_step(tmp_path):
    write(
        tmp_path,
        '{"step": 1, "loss": 3.0, "step_seconds": 0.2}',
        '{"step": 2, "forward_seconds": 0.1, "step_seconds": 0.3}',
        '{"step": 2, "loss": 2.0}',
        '{"step": 2, "val_loss": 2.5}',
    )
    history = read_history(tmp_path)
    assert [row["loss"] for row in history.train] == [3.0, 2.0]
    assert [row["val_loss"] for row in history.validation] == [2.5]
    assert [row["step_seconds"] for row in history.profile] == [0.3]
    assert history.last_step == 2


def test_lines_cut_short_and_bytes_that_are_no_text_are_left_out(tmp_path):
    write(
        tmp_path, '{"step": 1, "loss": 3.0}', b"\xff\xfe", "[1]", '{"loss": 1}', '{"step": 2, "lo'
    )
    assert [row["step"] for row in read_history(tmp_path).train] == [1]


def test_a_step_that_comes_twice_counts_as_it_was_written_last(tmp_path):
    write(
        tmp_path,
        *(f'{{"step": {step}, "loss": {loss}}}' for step, loss in ((1, 9), (2, 8), (2, 7), (1, 6))),
    )
    assert series(read_history(tmp_path).train, "loss") == [(1, 6), (2, 7)]


def test_losses_that_are_no_finite_numbers_are_gaps(tmp_path):
    values = ("1.5", "null", "NaN", "Infinity", '"3"', "true", "2.5")
    write(tmp_path, *(f'{{"step": {i}, "loss": {value}}}' for i, value in enumerate(values)))
    losses = [loss for _, loss in series(read_history(tmp_path).train, "loss")]
    assert losses == [1.5, None, None, None, None, None, 2.5]


def test_tokens_per_step_are_known_from_any_row(tmp_path):
    write(tmp_path, '{"step": 10, "loss": 1}', '{"step": 20, "tokens": 81920}')
    assert read_history(tmp_path).tokens_per_step == 4096
    write(tmp_path, '{"step": 10, "loss": 1}')
    assert read_history(tmp_path).tokens_per_step is None


@pytest.mark.parametrize("text", [None, "", "[]", '{"arguments": '])
def test_settings_that_are_missing_or_damaged_are_no_obstacle(tmp_path, text):
    write(tmp_path, '{"step": 1, "loss": 1}')
    if text is not None:
        (tmp_path / "settings.json").write_text(text)
    assert read_history(tmp_path).settings == {}


def test_samples_keep_their_text(tmp_path):
    write(tmp_path, '{"step": 1, "loss": 1}')
    rows = [{"step": 5, "prompt": "a", "text": "b\u2028c"}, {"step": 9, "prompt": "a", "text": ""}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write(tmp_path, *lines, '{"step": 12, "te', name="samples.jsonl")
    assert read_history(tmp_path).samples == rows


def test_what_is_no_run_or_has_no_step_yet_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"has no metrics\.jsonl: it is not the folder of a run"):
        read_history(tmp_path)
    write(tmp_path, "")
    with pytest.raises(UsageError, match="has not logged a step yet"):
        read_history(tmp_path)
