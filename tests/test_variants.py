"""Variants of the recipe: what is refused, trained, reused and shown."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import trained, variants
from lm.common.errors import UsageError
from lm.training.schedule import default_rates


def test_the_smallest_difference_that_seeds_show_is_that_of_a_paired_t_test():
    for one_seed_or_variant in ([[1.0], [2.0]], [[1.0, 2.0]]):
        assert variants.smallest_difference(np.array(one_seed_or_variant)) is None
    # Differences between two variants, by seed: 1, 2, 4. Their standard error is 0.882.
    found = variants.smallest_difference(np.array([[0.0, 5.0, 9.0], [1.0, 7.0, 13.0]]))
    assert found == pytest.approx(4.30 * 0.8819, rel=1e-3)


@pytest.fixture
def started(monkeypatch):
    """The last flags of each training. Nothing trains; the bits per byte are those of the seed, and
    10 more with --qk_norm."""
    started = []

    def train(kind, data, flags, seed, stage):
        started.append(flags[-1])
        return trained.Result(Path(), seed + 10 * ("--qk_norm" in flags[-1]), 600, 0.1)

    monkeypatch.setattr(variants, "train", train)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # `main` sets it; this restores it
    return started


def test_a_table_has_a_row_for_each_variant_and_the_smallest_difference(started, packed, capsys):
    """A variant of one flag is written with a space before the flag."""
    variants.main(["--data", str(packed), "--seeds", "1", "3", "--variants", "", " --qk_norm"])
    said = capsys.readouterr().out
    assert "| the recipe | 600 | 100 | 1.0000, 3.0000 | 2.0000 | +0.0000 |" in said
    assert "| `--qk_norm` | 600 | 100 | 11.0000, 13.0000 | 12.0000 | +10.0000 |" in said
    assert said.endswith("differences from 0.0000 are shown\n")
    variants.main(["--data", str(packed), "--seeds", "1", "--variants", "", " --qk_norm"])
    assert capsys.readouterr().out.endswith("only be shown with two variants and two seeds\n")


def test_leading_words_change_the_recipe():
    changed = {"shape": "4x256", "optimizer": "adamw", "data": "-8=k"}
    words = "shape=4x256 optimizer=adamw data=-8=k --beta1 0.8"
    assert variants.split_words(words) == (changed, "--beta1 0.8")


@pytest.mark.parametrize("word", ["wide", "shape=4", "shape=0x8", "optimizer=sgd", "shpae=4x8"])
def test_a_wrong_leading_word_is_reported_before_the_first_run(started, packed, capsys, word):
    with pytest.raises(SystemExit):
        variants.main(["--data", str(packed), "--variants", "", f"{word} --qk_norm"])
    assert repr(word) in capsys.readouterr().err
    assert not started


def test_a_finished_run_is_reused_unless_defaults_or_threads_have_changed(
    packed, tmp_path, monkeypatch
):
    names = []

    def finish(words, **how):
        names.append(words[words.index("--run_name") + 1])
        assert words[words.index("--seed") + 1] == "1"
        (run := trained.OUT / names[-1]).mkdir(parents=True)
        (run / "weights").mkdir()
        row = {"step": 2, "step_seconds": 1.0, "val_bits_per_byte": 2.0}
        (run / "metrics.jsonl").write_text(json.dumps(row))
        return SimpleNamespace(returncode=0)

    def runs(flags: str = "--dim 32") -> int:
        """Train with these flags; return the number of runs so far."""
        assert trained.train("variant", packed, ["--max_steps 2", flags], 1).bits_per_byte == 2
        return len(set(names))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trained.subprocess, "run", finish)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [runs(), runs(), runs("--dim 64")] == [1, 1, 2]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [runs(), runs()] == [3, 3]
    changed = {"embedding_lr_factor": 7.0}
    monkeypatch.setattr(
        "lm.training.arguments.default_rates", lambda *of: default_rates(*of) | changed
    )
    assert [runs(), runs()] == [4, 4]
    assert runs("--dim 32 --learning_rate 1e-3") == 5
    with pytest.raises(UsageError, match="dims"):
        runs("--dims 32")
    assert len(names) == 5
