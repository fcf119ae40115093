import pytest

from model import LMConfig
from training.engine.communication import Traffic, traffic
from training.engine.kinds import ENGINES, Kind
from training.engine.workload import Parameters, Workload

KINDS = {kind.config: kind for kind in ENGINES}
# Two small tensors of 10 and two of 490.
N = 1000
COUNTED = Parameters(N, N, 500, {10: 2, 490: 2}, flops_per_token=6 * N)


def workload(**changes) -> Workload:
    values = {"dtype": "bfloat16", "batch_size": 1, "accumulation_steps": 4, "processes": 2}
    return Workload(LMConfig(dim=8, n_heads=2), COUNTED, **values | changes)


@pytest.mark.parametrize(
    ("engine", "processes", "accumulation_steps", "dtype", "sent"),
    [
        # 2 bytes for each of 4 reductions, there and back, and the weights; half of it is sent
        ("zero2", 2, 4, "bfloat16", N * 2 * (2 * 4 + 1) // 2),
        ("zero2_offload", 2, 4, "bfloat16", N * 2 * (2 * 4 + 1) // 2),
        ("zero1", 2, 4, "bfloat16", N * 2 * (2 + 1) // 2),
        ("ddp", 2, 4, "bfloat16", N * 4 * 2 // 2),  # fp32 gradients, and no weights
        ("zero1", 4, 4, "bfloat16", N * 2 * (2 + 1) * 3 // 4),
        ("zero2", 2, 1, "bfloat16", N * 2 * (2 + 1) // 2),  # as ZeRO-1
        ("zero2", 2, 4, "float32", N * 4 * (2 * 4 + 1) // 2),
        # 4 times half of the gradients, and of the 980 that are let go of after backward; once half
        # of the 20 others
        ("zero3", 2, 4, "bfloat16", 4 * (N * 2 + 980 * 2) // 2 + 20 * 2 // 2),
    ],
)
def test_bytes_of_rings_by_hand(engine, processes, accumulation_steps, dtype, sent):
    work = workload(processes=processes, accumulation_steps=accumulation_steps, dtype=dtype)
    assert traffic(KINDS[engine], work).sent == sent


def test_weights_that_zero_3_lets_go_of_in_forward_come_again_in_backward():
    far = Kind("", "", 3, reuse_distance=0, persistence=0)
    once = Kind("", "", 3, reuse_distance=2 * N, persistence=0)
    work = workload()
    assert traffic(far, work).in_step == 4 * 2 * N * 2 // 2
    assert traffic(once, work).in_step == 4 * N * 2 // 2
    half = Kind("", "", 3, reuse_distance=N, persistence=0)
    assert traffic(half, work).in_step == 4 * 3 * N // 2 * 2 // 2


def test_gloo_scatters_by_reducing_for_all():
    on_gpu, on_cpu = (traffic(KINDS["zero3"], workload(on_cpu=each)) for each in (False, True))
    assert on_cpu.in_backward == 2 * on_gpu.in_backward
    assert on_cpu.in_step == on_gpu.in_step


def test_one_process_has_nobody_to_send_to():
    assert {traffic(kind, workload(processes=1)).sent for kind in ENGINES} == {0}


def test_what_is_offloaded_goes_to_the_cpu_and_back():
    moved = {name: traffic(kind, workload()).moved for name, kind in KINDS.items()}
    assert [moved[name] for name in ("ddp", "zero1", "zero2", "zero3")] == [0] * 4
    # fp32 gradients there and 16-bit weights back, of half of them
    assert moved["zero2_offload"] == N // 2 * (4 + 2)
    # and the weights for 4 times forward and backward
    assert moved["zero3_offload"] == N // 2 * (4 + 2 + 4 * 2 * 2)
    assert moved["zero_infinity"] == moved["zero3_offload"] + N // 2 * 2 * 12
    assert traffic(KINDS["zero3_offload"], workload(on_cpu=True)).moved == 0


def waiting(sent: Traffic, seconds: float = 3.0, micro_batches: int = 1) -> float:
    speeds = {"bandwidth": 100.0, "host_bandwidth": 10.0}
    return sent.waiting(seconds=seconds, micro_batches=micro_batches, **speeds)


def test_gradients_that_arrive_before_backward_ends_are_not_waited_for():
    # Two thirds of 3 s are backward.
    assert waiting(Traffic(in_backward=200)) == 0
    assert waiting(Traffic(in_backward=300)) == pytest.approx(1)
    # Of 3 micro-batches only the last one's backward has them, or all.
    assert waiting(Traffic(in_backward=100), micro_batches=3) == pytest.approx(1 / 3)
    assert waiting(Traffic(in_backward=200, backwards=3), micro_batches=3) == pytest.approx(0)


def test_weights_travel_behind_both_passes_and_the_rest_behind_nothing():
    assert waiting(Traffic(in_step=300)) == 0
    assert waiting(Traffic(in_step=400)) == pytest.approx(1)
    # Both at once share the way.
    assert waiting(Traffic(in_step=200, in_backward=200)) == pytest.approx(1)
    assert waiting(Traffic(after=50)) == pytest.approx(0.5)
    assert waiting(Traffic(moved=50)) == pytest.approx(5)


@pytest.mark.parametrize(("engine", "measured"), [("zero2", 25.7e6), ("zero1", 8.6e6)])
def test_bytes_are_those_that_a_network_device_counted(engine, measured):
    # run_accelerate.sh's model, two processes, 4 micro-batches, by /proc/net/dev
    config = LMConfig(dim=192, n_layers=4, n_heads=4)
    values = {"dtype": "bfloat16", "batch_size": 1, "accumulation_steps": 4, "processes": 2}
    work = Workload(config, Parameters.of(config), on_cpu=True, **values)
    assert traffic(KINDS[engine], work).sent == pytest.approx(measured, rel=0.01)
