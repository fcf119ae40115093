"""scripts.plan prints a table of engines, and the engine to use."""

import pytest

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
    # Seconds of computing, sending and hidden sending; hours at 40% of 989 TFLOP/s (6
    # FLOPs per parameter and token, and attention); lost time; GPUs that lose less than a tenth
    assert rows[0].split()[-1] == "2.17"  # GB sent
    time = "5.11 0.00602 0.00602 3.26 0% 8"
    assert lines[14].split() == ["DDP", *time.split()]
    assert "Take DDP, the first that fits, with your model's flags:" in lines


def test_a_run_that_is_too_short_to_be_compiled_needs_more_memory(capsys):
    flags = f"{FLAGS} --batch_size 24 --gpu_memory 48 --device H100"
    long, short = (page(capsys, flags + end) for end in ("", " --max_steps 3"))
    assert "26.24 GiB" in long[7]  # the row of ZeRO-2
    assert short[7] == page(capsys, f"{flags} --max_steps 3 --compile off")[7]
    assert "39.07 GiB" in short[7]


def test_a_smaller_gpu_gets_another_engine_or_none(capsys):
    def last(memory: int) -> str:
        flags = f"{FLAGS} --batch_size 1 --gpu_memory {memory} --device H100"
        return "\n".join(page(capsys, flags)[-4:])

    assert "Take ZeRO-" in last(6)
    assert "No engine fits" in last(1)


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
        ("--gpu_memory 8 --mfu 0", "must be above 0"),
        ("--gpu_memory 8 --ram 0", "--ram, --mfu and --tokens must be above 0"),
        ("--num_processes 4 --num_machines 3", "does not divide"),
        ("--gpu_memory 8 --network modem", "is no link"),
    ],
)
def test_flags_that_cannot_work_are_refused(refusal, flags, named):
    assert named in refusal(plan, *flags.split())


def test_hours_are_unknown_for_an_unknown_device_and_tokens_may_be_given(capsys):
    lines = page(capsys, "--dim 64 --n_layers 2 --tokens 1e6 --gpu_memory 8 --device Abacus")
    assert "0.001 billion tokens" in lines[0]
    assert lines[5].split()[-1] == "0.00"  # GB sent
    assert "Hours are unknown for Abacus in bf16: pass a --device such as H100" in lines
    assert lines[-1] == "ENGINE=ddp bash run_accelerate.sh"


def test_one_gpu_is_planned_as_part_of_a_machine_of_eight(capsys):
    """A second GPU is behind the link of the machine, not behind the network."""
    flags = f"{FLAGS.replace('processes 4', 'processes 1')} --gpu_memory 80 --device H100"
    flags += " --network 0.001"
    lines = page(capsys, flags)
    assert "1 machine; nvlink4 in a machine, 0.001 between machines, pcie5 to RAM" in lines
    assert lines[14].split()[-1] == "8"  # DDP
    assert lines[-1] == "More than 8 GPUs would lose 10% of the time or have no sequence."
    alone = page(capsys, f"{flags} --num_machines 1")
    assert alone[-1].startswith("More than 1 GPU would lose")


def test_machines_need_not_be_full(capsys):
    lines = page(capsys, f"{FLAGS.replace('processes 4', 'processes 9')} --gpu_memory 80")
    assert lines[2].startswith("2 machines; pcie4 in a machine")


def test_the_hours_of_an_engine_that_offloads_are_a_lower_bound(capsys):
    lines = page(capsys, f"{FLAGS} --gpu_memory 80 --device H100")
    assert ["≥" in line for line in lines[14:21]] == [False] * 4 + [True] * 3


@pytest.mark.parametrize(
    ("device", "link"),
    [
        ("NVIDIA A100-SXM4-80GB", "nvlink3 in a machine, ethernet100 between machines, pcie4"),
        ("NVIDIA H100 PCIe", "pcie5 in a machine, ethernet100 between machines, pcie5"),
        ("NVIDIA B200", "nvlink5 in a machine, ethernet100 between machines, pcie5"),
        ("NVIDIA GeForce RTX 4090", "pcie4 in a machine, ethernet100 between machines, pcie4"),
    ],
)
def test_the_name_of_a_gpu_decides_its_links(capsys, device, link):
    plan.main(["--dim", "64", "--n_layers", "2", "--gpu_memory", "24", "--device", device])
    assert f"1 machine; {link} to RAM" in capsys.readouterr().out
