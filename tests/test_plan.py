"""What engines send, the time that this takes, and what scripts.plan prints."""

import math
from dataclasses import replace

import pytest
from test_memory import STRATEGIES, workload

from lm.common.errors import UsageError
from lm.engine.plan import Network, Plan, bytes_per_second, links_of, step_time, traffic
from scripts import plan

FLAGS = "--dim 1024 --n_layers 32 --max_seq_len 1024 --accumulation_steps 32 --num_processes 4"


def page(capsys, flags: str) -> list[str]:
    plan.main(flags.split())
    return capsys.readouterr().out.splitlines()


def test_the_readmes_training_fits_with_ddp_on_four_gpus_of_48_gib(capsys):
    lines = page(capsys, f"{FLAGS} --batch_size 24 --gpu_memory 48 --device H100")
    assert lines[0].startswith("361.04 million parameters, 3,145,728 tokens per step, 7.22 billion")
    head, *rows = lines[4:12]
    assert all(len(line) <= 100 for line in lines)
    assert head.split("  ")[0] == "engine"
    assert [row.split("  ")[0] for row in rows] == [
        *("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-2, optimizer on the CPU"),
        *("ZeRO-3, all on the CPU", "ZeRO-3, all on NVMe"),
    ]
    # GB sent; hours at 40% of 989 TFLOP/s (6 FLOPs per parameter and token, and attention); lost
    # time; GPUs that lose less than a tenth
    assert rows[0].split()[-4:] == ["2.17", "3.26", "0%", "8"]
    assert ["≥" in row for row in rows] == [False] * 4 + [True] * 3  # with offload
    assert "Take DDP, the first that fits, with your model's flags:" in lines


def test_a_run_that_is_too_short_to_be_compiled_needs_more_memory(capsys):
    flags = f"{FLAGS} --batch_size 24 --gpu_memory 48 --device H100"
    long, short = (page(capsys, flags + end) for end in ("", " --max_steps 3"))
    assert "26.24 GiB" in long[7]  # the row of ZeRO-2
    assert short[7] == page(capsys, f"{flags} --max_steps 3 --compile off")[7]
    assert "39.07 GiB" in short[7]


def test_an_engine_whose_offloaded_tensors_do_not_fit_into_ram_is_not_taken(capsys):
    flags = "--dim 4096 --n_layers 32 --max_seq_len 1024 --batch_size 1 --num_processes 2"
    flags += " --gpu_memory 48 --device H100"
    *_, advice, command, _ = page(capsys, flags)  # the RAM of another machine is unknown
    assert "Take ZeRO-2, optimizer on the CPU" in advice
    assert command == "ENGINE=zero2_offload bash run_accelerate.sh"
    assert "Take ZeRO-2, optimizer on the CPU" in page(capsys, f"{flags} --ram 128")[-3]
    assert "Take ZeRO-3, all on NVMe" in page(capsys, f"{flags} --ram 32")[-3]
    assert "No engine fits" in page(capsys, f"{flags} --ram 0.1")[-1]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--device H100", "--gpu_memory"),
        ("--dim 63", "dim 63 is not divisible"),
        ("--gpu_memory 8 --ram 0", "--ram, --mfu and --tokens must be above 0"),
        ("--num_processes 4 --num_machines 3", "does not divide"),
    ],
)
def test_flags_that_cannot_work_are_refused(refusal, flags, named):
    assert named in refusal(plan, *flags.split())


def test_hours_are_unknown_for_an_unknown_device_and_machines_need_not_be_full(capsys):
    flags = "--dim 64 --n_layers 2 --tokens 1e6 --gpu_memory 8 --device Abacus --num_processes 9"
    lines = page(capsys, flags)
    assert "0.001 billion tokens" in lines[0]
    assert lines[2].startswith("2 machines; pcie4 in a machine")
    assert lines[5].split()[-1] == "0.00"  # GB sent
    assert "Hours are unknown for Abacus in bfloat16: pass a --device such as H100" in lines
    assert lines[-1] == "ENGINE=ddp bash run_accelerate.sh"


def test_one_gpu_is_planned_as_part_of_a_machine_of_eight(capsys):
    """A second GPU is behind the link of the machine, not behind the network."""
    flags = f"{FLAGS.replace('processes 4', 'processes 1')} --gpu_memory 80 --device H100"
    flags += " --network 0.001"
    lines = page(capsys, flags)
    assert "1 machine; nvlink4 in a machine, 0.001 between machines, pcie5 to RAM" in lines
    assert lines[5].split()[-1] == "8"  # DDP
    assert lines[-1] == "More than 8 GPUs would lose 10% of the time or have no sequence."
    alone = page(capsys, f"{flags} --num_machines 1")
    assert alone[-1].startswith("More than 1 GPU would lose")


def test_the_name_of_a_gpu_decides_its_links():
    assert links_of("NVIDIA A100-SXM4-80GB") == ("nvlink3", "pcie4")
    assert links_of("NVIDIA H100 PCIe") == ("pcie5", "pcie5")
    assert links_of("NVIDIA GeForce RTX 4090") == ("pcie4", "pcie4")


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
        hidden = 2 / 3  # s, in the backward pass
        assert time.seconds == pytest.approx(1 + time.sent / rate - hidden)


def test_a_step_hides_what_the_engine_can_send_during_computing():
    work = workload(processes=2, accumulation_steps=4)
    sent = {name: traffic(STRATEGIES[name], work) for name in ("ddp", "zero1", "zero2", "zero3")}
    rate = 1e6
    network = Network(2, rate, rate)
    seconds = {name: sum(each) / rate for name, each in sent.items()}
    computing = 4 * seconds["ddp"]  # so the backward of a micro-batch has two thirds of the time

    def hidden(name: str, computing: float, coalesces: bool = False) -> float:
        strategy = replace(STRATEGIES[name], coalesces=coalesces)
        time = step_time(strategy, work, computing, network)
        assert time.lost == pytest.approx(1 - computing / time.seconds, abs=1e-9)
        return computing + sum(traffic(strategy, work)) / rate - time.seconds

    zero2 = sent["zero2"][0] / rate  # gradients
    expected = {
        "ddp": 2 / 3 * seconds["ddp"],
        "zero1": 0,
        "zero2": zero2,
        "zero3": seconds["zero3"],
    }
    assert {name: hidden(name, computing) for name in sent} == pytest.approx(expected)
    assert hidden("zero2", computing, coalesces=True) == pytest.approx(0)
    little = seconds["ddp"] / 10  # less computing than sending
    shares = {"ddp": 2 / 3 / 4, "zero1": 0, "zero2": 2 / 3, "zero3": 1}
    expected = {name: share * little for name, share in shares.items()}
    assert {name: hidden(name, little) for name in sent} == pytest.approx(expected)


def test_more_or_fewer_processes_share_the_global_batch():
    """And ZeRO-2 reduces gradients once per step as soon as there are several micro-batches."""
    work = workload(processes=8)  # 3 sequences each: 24 in a step
    network, strategy = Network(8, 1e3, 1e3), STRATEGIES["zero2"]
    for processes, micro_batches in {1: 8, 2: 4, 3: 3, 5: 2, 8: 1, 24: 1}.items():
        each = workload(processes=processes, accumulation_steps=micro_batches)
        alone = replace(strategy, coalesces=micro_batches > 1)
        expected = step_time(alone, each, 8 / processes, network)
        run = Plan(work=work, network=network, computing=1.0, memory=2**40)
        assert run.shared_by(processes, strategy) == pytest.approx(expected)
        if micro_batches > 1:
            little = replace(run, memory=0).shared_by(processes, strategy)
            assert (little.sent > expected.sent) == (processes > 1)


def test_the_most_processes_lose_less_than_a_tenth():
    work, slow = workload(processes=1, accumulation_steps=8), Network(2, 1e9, 1e4)
    run = Plan(work=work, network=slow, computing=1.0, memory=2**40)
    assert run.most_processes(STRATEGIES["ddp"]) == 2  # one machine
    fast = Network(2, 1e9, math.inf)
    # As many as there are sequences:
    assert replace(run, network=fast).most_processes(STRATEGIES["ddp"]) == 16
    none = replace(run, network=fast._replace(pcie=1e3))
    assert none.most_processes(STRATEGIES["zero2_offload"]) == 0
