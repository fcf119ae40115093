"""The mean loss over every target since the last report, and the steps that are left out of it."""

from types import SimpleNamespace

import pytest
import torch

from training.log import LossMeter

NAN, INF = float("nan"), float("inf")


def meter_of(*parts: str, others: tuple = (), processes: int = 1) -> LossMeter:
    """Make a meter of one process.

    Args:
        others: sums, weight and tokens of the other processes.
    """
    theirs = torch.tensor(others) if others else 0
    device = torch.device("cpu")
    accelerator = SimpleNamespace(
        device=device, num_processes=processes, reduce=lambda mine: mine + theirs
    )
    return LossMeter(accelerator, parts)


def feed(meter: LossMeter, *losses: float, weight: float = 1.0, norm=0.5) -> None:
    """Take a step with a micro-batch for each loss."""
    for loss in losses:
        meter.add(weight, loss=torch.tensor(loss))
    meter.end_step(norm)


def mean_of(meter: LossMeter) -> float | None:
    return meter.take(0)[0]["loss"]


def test_the_mean_is_over_every_target_since_the_last_report():
    meter = meter_of()
    feed(meter, 1.0, 3.0, weight=0.25)
    feed(meter, 6.0)
    assert mean_of(meter) == pytest.approx((0.25 * 1 + 0.25 * 3 + 6) / 1.5)
    feed(meter, 4.0, 8.0)
    assert mean_of(meter) == 6.0
    assert mean_of(meter) is None


@pytest.mark.parametrize("accumulation_steps", [1, 3, 8])
def test_where_every_target_counts_it_is_the_plain_mean_to_the_bit(accumulation_steps):
    """The sum goes step by step in fp32."""
    meter = meter_of()
    steps = 4 * torch.rand(7, accumulation_steps, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(())
    for losses in steps:
        feed(meter, *losses.tolist())
        of_step = torch.zeros(())
        for loss in losses:
            of_step += loss
        total += of_step
    assert mean_of(meter) == total.item() / steps.numel()


def test_parts_are_means_over_the_same_targets():
    meter = meter_of("hard_loss", "agreement")
    for weight, loss in ((1.0, 2.0), (0.5, 8.0)):
        parts = {"agreement": torch.tensor(loss / 16), "hard_loss": torch.tensor(loss / 2)}
        meter.add(weight, loss=torch.tensor(loss), **parts)
    meter.end_step(0.5)
    expected = {"loss": 6 / 1.5, "hard_loss": 3 / 1.5, "agreement": 0.375 / 1.5}
    assert meter.take(0)[0] == pytest.approx(expected)


@pytest.mark.parametrize("weight", [0.25, 0.0])
def test_other_processes_count_by_their_targets(weight):
    meter = meter_of(others=(weight * (6.0 + 8.0), 2 * weight, 100.0))
    feed(meter, 1.0, 3.0)
    means, tokens = meter.take(28)
    assert means["loss"] == pytest.approx((1 + 3 + weight * (6 + 8)) / (2 + 2 * weight))
    assert tokens == 128


@pytest.mark.parametrize("bad", [NAN, INF, torch.tensor(NAN)])
def test_a_step_without_a_finite_gradient_is_left_out_and_counted(bad):
    meter, rows = meter_of(), []
    for loss, norm in [(5.0, 1.0), (NAN, bad), (7.0, bad), (2.0, torch.tensor(1.0))]:
        feed(meter, loss, norm=norm)
        rows.append((meter.skipped_steps(), meter.bad_in_row()))
    assert rows == [(0, 0), (1, 1), (2, 2), (2, 0)]
    assert mean_of(meter) == 3.5
    feed(meter, 1.0, norm=bad)
    assert mean_of(meter) is None


def test_a_step_without_any_target_has_no_loss():
    meter = meter_of()
    feed(meter)
    assert mean_of(meter) is None
    assert meter.skipped_steps() == 0


def test_a_resumed_meter_goes_on_to_the_bit_without_the_step_under_way():
    meter = meter_of("soft_loss")
    for weight in (0.1, 0.7):
        meter.add(weight, loss=torch.tensor(2.7), soft_loss=torch.tensor(0.9))
        meter.end_step(0.5)
    meter.add(1.0, loss=torch.tensor(9.0), soft_loss=torch.tensor(9.0))
    state = meter.state()
    assert state.keys() == {"loss", "soft_loss", "weight", "skipped_steps"}
    assert state["weight"] == pytest.approx(0.8)
    resumed = meter_of("soft_loss")
    resumed.load_state([state], rank=0)
    assert resumed.state() == state
    meter.end_step(INF)
    assert resumed.take(0) == meter.take(0)


@pytest.mark.parametrize(("processes", "rank"), [(3, 0), (3, 2), (1, 0), (2, 1), (6, 5)])
def test_each_process_gets_its_own_state_back_or_an_equal_share(processes, rank):
    states = [{"loss": 1.0 + i, "weight": 2.0 + i, "skipped_steps": 4} for i in range(3)]
    meter = meter_of(processes=processes)
    meter.load_state(states, rank)
    share = {"loss": 6 / processes, "weight": 9 / processes, "skipped_steps": 4}
    assert meter.state() == pytest.approx(states[rank] if processes == 3 else share)
