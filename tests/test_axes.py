import math

import pytest

from report.axes import count_axis, downsample, show, thin, value_axis


@pytest.mark.parametrize(
    ("values", "from_zero"),
    [([2.54, 2.65], False), ([8.78, 2.9], False), ([1e-3, 0.0], True), ([17.0, 18.5], True)],
)
def test_an_axis_holds_all_values_and_begins_and_ends_at_ticks(values, from_zero):
    axis = value_axis(values, from_zero)
    ticks = [tick for tick, _ in axis.ticks()]
    assert ticks[0] == pytest.approx(axis.low)
    assert ticks[-1] == pytest.approx(axis.high)
    assert axis.low <= min(values)
    assert max(values) <= axis.high
    assert 3 <= len(ticks) <= 8
    assert (axis.low == 0) == from_zero


@pytest.mark.parametrize("value", [0.0, 2.5, 1e-12, 1e300, -3.0])
@pytest.mark.parametrize("from_zero", [True, False])
def test_a_single_value_has_an_axis_of_some_length(value, from_zero):
    axis = value_axis([value], from_zero)
    assert 0 <= axis.share(value) <= 1
    assert len({text for _, text in axis.ticks()}) >= 2


def test_values_that_differ_by_a_spike_are_drawn_by_powers_of_ten():
    axis = value_axis([0.5] * 50 + [300.0], from_zero=True)
    assert axis.logarithmic
    assert [text for _, text in axis.ticks()] == ["0.1", "1", "10", "100", "1,000"]
    assert axis.share(1) - axis.share(0.1) == pytest.approx(axis.share(10) - axis.share(1))
    assert not value_axis([0.5] * 50 + [300.0], from_zero=True, linear=True).logarithmic
    assert not value_axis([0.0] * 50 + [300.0], from_zero=True).logarithmic  # no power is zero


def test_an_axis_of_steps_goes_from_zero_in_whole_numbers():
    assert [text for _, text in count_axis(3).ticks()] == ["0", "1", "2", "3"]
    assert [text for _, text in count_axis(620).ticks()] == ["0", "200", "400", "600"]
    assert [text for _, text in count_axis(12.5).ticks()] == ["0", "3", "6", "9", "12"]
    assert count_axis(620).share(620) == 1


def test_thinning_keeps_ends_spikes_and_about_the_limit():
    points = [(step, math.sin(step / 500)) for step in range(100_000)]
    points[31_415] = (31_415, 50.0)
    points[27_182] = (27_182, -50.0)
    kept = downsample(points, 1000)
    assert 900 <= len(kept) <= 1002
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert points[31_415] in kept
    assert points[27_182] in kept
    assert kept == sorted(kept)
    assert downsample(points[:500], 1000) == points[:500]


def test_thinning_keeps_a_long_gap_as_a_gap():
    points = [(step, None if 300 <= step < 600 else 1.0) for step in range(1000)]
    kept = downsample(points, 100)
    assert any(300 <= step < 600 for step, _ in kept)
    assert all((value is None) == (300 <= step < 600) for step, value in kept)


def test_evenly_thinned_items_keep_both_ends():
    assert thin(list(range(10)), 4) == [0, 3, 6, 9]
    assert thin([1, 2], 4) == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2.90493, "2.905"),
        (0.0003, "0.0003"),
        (1e-5, "1e-05"),
        (17_243.3, "17,243"),
        (20_000, "20,000"),
        (2_457_600, "2.458M"),
        (3e9, "3B"),
        (1e20, "1e+20"),
        (-1.5, "-1.5"),
    ],
)
def test_numbers_are_short(value, text):
    assert show(value) == text
