"""The bytes that engines send, the time that this takes, and what scripts.plan makes of it."""

import math
from dataclasses import replace

import pytest
from test_memory import STRATEGIES, workload

from lm.common.errors import UsageError
from lm.engine.network import Network, Plan, bytes_per_second, step_time, traffic


def test_the_bytes_sent_equal_a_count_by_hand():
    n, sent = workload().shapes.num_parameters(), {}
    for name, strategy in STRATEGIES.items():
        work = workload(processes=4, accumulation_steps=3)
        sent[name] = sum(traffic(strategy, work)[:2]) / (3 / 4 * n)
        assert traffic(strategy, workload())[:2] == (0, 0)  # one process sends nothing
    assert sent["ddp"] == pytest.approx(2 * 4, rel=1e-3)  # all-reduce (2) of 4 bytes
    assert sent["zero1"] == pytest.approx(2 * (2 + 1), rel=1e-3)  # all-reduce, gather of 2 bytes
    assert sent["zero2"] == pytest.approx(2 * (2 * 3 + 1), rel=1e-3)  # 3 micro-batches
    once = sum(traffic(replace(STRATEGIES["zero2"], coalesces=True), work)) / (3 / 4 * n)
    assert once == pytest.approx(2 * (2 + 1), rel=1e-3)
    # zero3.json keeps the weights of a small model gathered until backward; zero_infinity does not.
    assert sent["zero3"] == pytest.approx(2 * 3 * (1 + 1), rel=1e-3)
    assert sent["zero_infinity"] == pytest.approx(2 * 3 * (1 + 2), rel=1e-3)


def test_offload_copies_gradients_and_weights_through_pcie():
    n, copied = workload().shapes.num_parameters(), {}
    for name in ("zero2", "zero2_offload", "zero3_offload"):
        *_, copied[name] = traffic(STRATEGIES[name], workload(processes=4, accumulation_steps=3))
    assert copied["zero2"] == 0
    assert copied["zero2_offload"] == pytest.approx((4 + 2) * n / 4, rel=1e-3)
    # In each of 3 micro-batches: gradients in fp32 there and back, and weights once (see above).
    assert copied["zero3_offload"] == pytest.approx(3 * (8 + 2) * n / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12.5", 12.5e9), ("nvlink4", 360e9), ("8xinfiniband400", 320e9), ("ethernet25", 2.5e9)],
)
def test_a_link_is_a_name_a_multiple_of_a_name_or_a_number(text, expected):
    assert bytes_per_second(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "token-ring", "xpcie4", "2.5xpcie4", "0xpcie4"])
def test_other_links_are_refused(text):
    with pytest.raises(UsageError, match="pass GB/s"):
        bytes_per_second(text)


def test_the_slowest_link_of_the_ring_decides():
    within, across = workload(processes=8), workload(processes=16)
    for work, between, rate in ((within, 50, 100), (across, 50, 50), (across, 800, 100)):
        time = step_time(STRATEGIES["ddp"], work, 1.0, Network(8, link=100, between=between))
        assert time.sending == pytest.approx(time.sent / rate)


def test_a_step_hides_what_the_engine_can_send_during_computing():
    work = workload(processes=2, accumulation_steps=4)
    sent = {name: traffic(STRATEGIES[name], work) for name in ("ddp", "zero1", "zero2", "zero3")}
    rate = 1e6
    network = Network(2, rate, rate)
    seconds = {name: sum(each) / rate for name, each in sent.items()}
    computing = 4 * seconds["ddp"]  # so the backward of a micro-batch has two thirds of the time
    found = {name: step_time(STRATEGIES[name], work, computing, network) for name in sent}
    for name, time in found.items():
        assert time.sending == pytest.approx(seconds[name])
        assert time.lost == pytest.approx(1 - computing / time.total)
    assert found["ddp"].hidden == pytest.approx(2 / 3 * seconds["ddp"])
    assert found["zero1"].hidden == 0
    assert found["zero2"].hidden == pytest.approx(sent["zero2"][0] / rate)
    assert found["zero3"].hidden == pytest.approx(seconds["zero3"])
    once = step_time(replace(STRATEGIES["zero2"], coalesces=True), work, computing, network)
    assert once.hidden == 0
    little = seconds["ddp"] / 10  # less computing than sending
    hidden = {name: step_time(STRATEGIES[name], work, little, network).hidden for name in sent}
    expected = {"ddp": 2 / 3 / 4, "zero1": 0, "zero2": 2 / 3, "zero3": 1}
    assert hidden == pytest.approx({name: share * little for name, share in expected.items()})


def test_more_or_fewer_processes_share_the_global_batch():
    """And ZeRO-2 reduces gradients once per step as soon as there are several micro-batches."""
    work = workload(processes=8)  # 3 sequences each: 24 in a step
    network, strategy = Network(8, 1e3, 1e3), STRATEGIES["zero2"]
    for processes, micro_batches in {1: 8, 2: 4, 3: 3, 5: 2, 8: 1, 24: 1}.items():
        each = workload(processes=processes, accumulation_steps=micro_batches)
        alone = replace(strategy, coalesces=micro_batches > 1)
        expected = step_time(alone, each, 8 / processes, network)
        plan = Plan(work=work, network=network, computing=1.0, memory=2**40)
        assert plan.shared_by(processes, strategy) == pytest.approx(expected)
        if micro_batches > 1:
            little = replace(plan, memory=0).shared_by(processes, strategy)
            assert (little.sending > expected.sending) == (processes > 1)


def test_the_most_processes_lose_less_than_a_tenth():
    work, slow = workload(processes=1, accumulation_steps=8), Network(2, 1e9, 1e4)
    plan = Plan(work=work, network=slow, computing=1.0, memory=2**40)
    assert plan.most_processes(STRATEGIES["ddp"]) == 2  # one machine
    fast = Network(2, 1e9, math.inf)
    # As many as there are sequences:
    assert replace(plan, network=fast).most_processes(STRATEGIES["ddp"]) == 16
    none = replace(plan, network=fast._replace(pcie=1e3))
    assert none.most_processes(STRATEGIES["zero2_offload"]) == 0
