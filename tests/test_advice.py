import pytest

from training.advice import bytes_moved, faster_engine


def test_zero1_reduces_once_and_zero2_in_every_micro_batch():
    # 2 bytes per parameter for each reduction, and 2 for handing round the weights
    assert bytes_moved(1000, 1, accumulation_steps=8) == 2 * 1000 * 2
    assert bytes_moved(1000, 2, accumulation_steps=8) == 2 * 1000 * 9
    assert bytes_moved(1000, 2, 1) == bytes_moved(1000, 1, 1)


def advice(**changes) -> str | None:
    values = {"zero_stage": 2, "processes": 2, "accumulation_steps": 8}
    values |= {"n_parameters": 10**9, "needed": 10, "free": 10}
    return faster_engine(**values | changes)


def test_long_accumulation_under_zero2_is_advised_against_where_zero1_fits():
    line = advice()
    assert "ZeRO-1" in line
    assert "3.73 GiB per step instead of 16.76" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 1},
        {"zero_stage": None},
        {"processes": 1},
        {"accumulation_steps": 1},
        {"free": 9},
        {"free": None},
    ],
    ids=lambda changes: str(changes),
)
def test_nothing_is_advised_where_nothing_is_gained_or_known(changes):
    assert advice(**changes) is None
