import pytest

from training.engine.advice import bytes_sent, faster_engine

N = 1000


@pytest.mark.parametrize(
    ("zero_stage", "processes", "accumulation_steps", "dtype", "sent"),
    [
        # 2 bytes for each of 4 reductions, there and back, and the weights; half of it is sent
        (2, 2, 4, "bfloat16", N * 2 * (2 * 4 + 1) // 2),
        (1, 2, 4, "bfloat16", N * 2 * (2 + 1) // 2),
        (None, 2, 4, "bfloat16", N * 4 * 2 // 2),  # fp32 gradients, and no weights
        (1, 4, 4, "bfloat16", N * 2 * (2 + 1) * 3 // 4),
        (2, 2, 1, "bfloat16", N * 2 * (2 + 1) // 2),  # as ZeRO-1
        (2, 2, 4, "float32", N * 4 * (2 * 4 + 1) // 2),
    ],
)
def test_bytes_of_a_ring_by_hand(zero_stage, processes, accumulation_steps, dtype, sent):
    assert bytes_sent(N, zero_stage, processes, accumulation_steps, dtype) == sent


@pytest.mark.parametrize(("stage", "measured"), [(2, 25.7e6), (1, 8.6e6)])
def test_bytes_are_those_that_a_network_device_counted(stage, measured):
    # 2.85 million parameters, two processes, 4 micro-batches, by /proc/net/dev
    assert bytes_sent(2_850_000, stage, 2, 4, "bfloat16") == pytest.approx(measured, rel=0.01)


def advice(fitting=(None, 1), **changes) -> str | None:
    values = {"zero_stage": 2, "processes": 2, "accumulation_steps": 8, "on_cpu": True}
    values |= {"n_parameters": 10**9, "dtype": "bfloat16", "fits": lambda stage: stage in fitting}
    return faster_engine(**values | changes)


def test_the_fastest_engine_that_fits_is_named():
    line = advice()
    assert line.startswith("DDP would be faster")
    assert "not in each of 8 micro-batches (4,000 MB sent per process and step instead" in line
    assert "of 17,000) and fits" in line
    assert "--multi_gpu" in line
    assert "\n" not in line
    assert advice(fitting=(1,)).startswith("ZeRO-1 would be faster")
    assert '"stage": 1' in advice(fitting=(1,))


def test_on_gpus_it_is_the_one_that_sends_the_fewest_bytes():
    line = advice(on_cpu=False)
    assert line.startswith("ZeRO-1 would be faster")
    assert "(3,000 MB sent per process and step instead of 17,000)" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 1},
        {"zero_stage": None},
        {"processes": 1},
        {"accumulation_steps": 1},
        {"fitting": ()},
    ],
    ids=lambda changes: str(changes),
)
def test_nothing_is_advised_where_nothing_is_gained_or_fits(changes):
    assert advice(**changes) is None
