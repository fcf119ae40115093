"""run_accelerate.sh measures the time of a few real steps, on a machine that others use too."""

from types import SimpleNamespace

import pytest
import torch

from lm.common.errors import UsageError
from lm.training import measurement
from lm.training.arguments import TrainingArguments, build_parser
from lm.training.measurement import TimedRun, measure
from train_pretrain_accelerate import train

TINY = "--dim 32 --n_layers 1 --n_heads 4 --max_seq_len 32 --dtype float32 --batch_size 8 "


@pytest.fixture
def timed(packed, monkeypatch):
    """Measures steps on a machine where `seconds(rows, threads, step)` is the time of a step; also
    returns the list of (rows, threads) of all steps. A validation of a sequence takes 0.5 s."""

    def timed(seconds, threads=(2, 1), limit=100.0, more="--compile off"):
        now, steps = [0.0], []
        real_batches, real_validate = TimedRun.micro_batches, measurement.validate

        def micro_batches(run):
            for batch in real_batches(run):
                steps.append((len(batch.tokens), torch.get_num_threads()))
                now[0] += seconds(*steps[-1], len(steps))
                yield batch

        def validate(model, batches, *others):
            now[0] += 0.5 * len(batches[0][0])
            return real_validate(model, batches, *others)

        monkeypatch.setattr(TimedRun, "micro_batches", micro_batches)
        monkeypatch.setattr(measurement, "validate", validate)
        monkeypatch.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        flags = vars(build_parser().parse_args(f"{TINY} --data {packed} {more}".split()))
        return measure(train, TrainingArguments, flags, threads, limit), steps

    return timed


def test_the_fastest_number_of_threads_is_found_and_given_back(timed):
    before = torch.get_num_threads()
    for fastest in (1, 2):
        found, _ = timed(lambda rows, n, step, fastest=fastest: 0.1 if n == fastest else 0.3)
        assert (found.threads, found.step) == (fastest, pytest.approx(0.1))
        assert found.sample == pytest.approx(0.5)
    assert torch.get_num_threads() == before
    assert timed(lambda *_: 0.1, threads=())[0].threads is None


@pytest.mark.parametrize("disturbed", [(1, 2, 3), (4,), (6, 7)])
def test_a_window_that_is_disturbed_does_not_count(timed, disturbed):
    """Steps 1 to 3 allocate memory. A window that is not disturbed has two steps of 0.2 seconds."""

    def seconds(rows, threads, step):
        return 0.025 * rows * (9 if step in disturbed else 1)

    assert timed(seconds, threads=(1,))[0].step == pytest.approx(0.2)


def test_a_slow_machine_measures_steps_of_fewer_sequences_and_scales_them(timed):
    found, steps = timed(lambda rows, n, step: 5.0 * rows, limit=100.0)
    assert {rows for rows, _ in steps} == {1, 2}
    assert (found.step, found.one) == pytest.approx((5.0 * 8, 5.0))
    assert found.with_rows(3, 8).step == pytest.approx(5.0 * 3)
    assert sum(5.0 * rows for rows, _ in steps) < 100
    _, steps = timed(lambda rows, n, step: 1e-3 * rows)
    assert {rows for rows, _ in steps} == {1, 8}


def test_flags_that_cannot_work_are_an_error(timed):
    with pytest.raises(UsageError, match="nowhere"):
        timed(lambda *_: 0.1, more="--data nowhere")
