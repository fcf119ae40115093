import pytest

from model import LMConfig
from training.engine.communication import Traffic, traffic
from training.engine.kinds import Kind, engines
from training.engine.workload import Parameters, Workload

ENGINES = engines(dim=8)
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
    far = Kind("", 3, reuse_distance=0, persistence=0)
    once = Kind("", 3, reuse_distance=2 * N, persistence=0)
    work = workload()
    assert traffic(far, work).in_step == 4 * 2 * N * 2 // 2
    assert traffic(once, work).in_step == 4 * N * 2 // 2
    half = Kind("", 3, reuse_distance=N, persistence=0)
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
    half = N // 2  # the share of one
    # ZeRO-2 adds up on the GPU: at the end of the step fp32 gradients go, 16-bit weights come.
    assert moved["zero2_offload"] == half * (4 + 2)
    assert traffic(KINDS["zero3_offload"], workload(on_cpu=True)).moved == 0
    # stage3.py, partition_grads: the buffer of sums is in RAM. First micro-batch: copied there, and
    # taken to the GPU for what follows; each other one: taken to the GPU, and copied back. At the
    # boundary once more, to where the optimizer steps. Weights stay in RAM, and are taken to the
    # GPU once in each micro-batch, for they come again so soon that they stay for backward; the
    # small ones once a step.
    first, other, boundary = 4 + 4, 4 + 4, 4
    weights = 2 * (4 * 980 + 20) // 2
    everything = half * (first + 3 * other + boundary) + weights
    assert moved["zero3_offload"] == everything
    # NVMe: gradients go; they and the state come to be stepped; state and weights go. And weights
    # are let go of, for buffers are few: they come for backward again.
    again = 2 * 4 * 980 // 2
    assert moved["zero_infinity"] - everything == half * (4 + (4 + 12) + (12 + 2)) + again
    # Sums in the precision of the model are added up in RAM under ZeRO-2 too.
    rough = Kind("", 2, "cpu", fp32_sums=False)
    assert traffic(rough, workload()).moved == half * (2 * 4 + 2 * 3 + 4 + 2)
    assert traffic(rough, workload(accumulation_steps=1)).moved == half * (4 + 2)


def test_weights_alone_may_be_offloaded():
    mixture = Kind("", 3, parameters_on="cpu", reuse_distance=0, persistence=0)
    # twice in each of 4 micro-batches, 2 bytes, of half
    # and the new ones back
    assert traffic(mixture, workload()).moved == N // 2 * (4 * 2 * 2 + 2)
    on_gpu = Kind("", 3, "cpu", reuse_distance=0, persistence=0)
    assert traffic(on_gpu, workload()).moved == N // 2 * (4 * 8 + 4 + 2)


@pytest.mark.parametrize(
    ("dtype", "kind", "after_backward"),
    [
        ("bfloat16", Kind("", 1), True),
        ("float16", Kind("", 1), False),
        ("bfloat16", Kind("", 1, fp32_sums=False), False),
        ("bfloat16", Kind("", 1, "cpu"), False),
    ],
)
def test_zero_1_sends_behind_backward_but_in_bf16_with_fp32_sums(dtype, kind, after_backward):
    assert (traffic(kind, workload(dtype=dtype)).in_backward == 0) == after_backward


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
