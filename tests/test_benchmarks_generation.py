from itertools import count
from types import SimpleNamespace

import pytest
import torch

from benchmarks import generation
from benchmarks.generation import llama_of, main, measure, untrained


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(generation, "PROMPT_TOKENS", 5)
    monkeypatch.setattr(generation, "NEW_TOKENS", 6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_with_both_on_the_same_weights(capsys):
    main(["--sizes", "3m", "--dtypes", "float32", "--batch_sizes", "1,3", "--rounds", "1"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    head, _, *rows = map(cells, lines)
    assert head[:3] == ["model", "precision", "prompts"]
    assert [row[:3] for row in rows] == [["3m", "float32", "1"], ["3m", "float32", "3"]]
    assert [row[-1] for row in rows] == ["yes", "yes"]


def test_speeds_are_medians_and_the_ratio_is_taken_within_a_round(monkeypatch):
    # Seconds of ours and theirs in three rounds; the machine is slow in the last.
    seconds = [1.0, 2.0, 1.0, 3.0, 6.0, 6.0]
    clock = iter(
        [tick for start, taken in zip(count(), seconds) for tick in (start, start + taken)]
    )
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    runs = {"ours": lambda: [[1]], "transformers": lambda: [[2]]}
    row = measure(runs, batch_size=2, rounds=3)
    assert list(row.values()) == ["12", "4", "2.00", "no"]


def test_the_peer_computes_the_same_logits():
    model = untrained("3m")
    tokens = torch.randint(model.config.vocab_size, (2, 11))
    with torch.no_grad():
        ours, theirs = model(tokens).logits, llama_of(model, "float32")(tokens).logits
    assert ours.abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sizes 7b", "--sizes: '7b' is none of 3m, 26m, 104m"),
        ("--dtypes=", "--dtypes: '' is none of"),
        ("--batch_sizes many", "--batch_sizes: whole numbers from 1 on, not 'many'"),
        ("--rounds 0", "--rounds: whole numbers from 1 on, not '0'"),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_line(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        main(flags.split())
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
