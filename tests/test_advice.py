from dataclasses import replace

import pytest

from model import LMConfig
from training.engine.advice import choices, faster_engine, lighter_engine
from training.engine.kinds import engines, kind_of
from training.engine.memory import needs as needed
from training.engine.workload import Parameters, Workload

KINDS = {kind.config: kind for kind in engines(LMConfig().dim)}
N = 10**9
COUNTED = Parameters(N, N, N // 4, {N // 4: 4}, flops_per_token=6 * N)


def workload(**changes) -> Workload:
    values = {"dtype": "bfloat16", "batch_size": 1, "accumulation_steps": 8, "processes": 2}
    return Workload(LMConfig(), **{"parameters": COUNTED, "on_cpu": True} | values | changes)


def needs(name: str, work: Workload) -> int:
    return needed(KINDS[name], work)


def advice(name: str = "zero2", room: int | None = 10**12, **changes) -> str | None:
    return faster_engine(KINDS[name], workload(**changes), room)


def test_the_fastest_engine_that_fits_is_named():
    line = advice()
    assert line.startswith("DDP would be faster")
    assert "sends 4,000 MB per process and step, not 17,000, and fits" in line
    assert "--config_file configs/ddp.yaml" in line
    assert "ENGINE=ddp " in line
    assert "\n" not in line


def test_where_it_does_not_fit_the_next_one_is():
    work = workload(on_cpu=False, processes=8)
    room = needs("zero1", work)
    assert room < needs("ddp", work)
    line = faster_engine(KINDS["zero2"], work, room)
    assert line.startswith("ZeRO-1 would be faster")
    assert "sends 5,250 MB" in line  # 2 bytes of gradients there and back and of weights, 7 / 8
    assert faster_engine(KINDS["zero2"], work, needs("zero2", work) - 1) is None


def test_a_gpu_is_given_the_same_order():
    assert advice(on_cpu=False).startswith("DDP would be faster")


def test_what_gathers_or_moves_weights_for_nothing_is_told_so():
    assert "it sends " in advice("zero3")
    assert "it moves nothing to the CPU, " in advice("zero2_offload", on_cpu=False)
    assert "the CPU" not in advice("zero2_offload", on_cpu=True)  # where there is no other place
    room = needs("zero1", workload(on_cpu=False)) - 1
    room = max(room, needs("zero2", workload(on_cpu=False)))
    assert advice("zero3_offload", room, on_cpu=False) is not None


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("zero1", {}),  # sends less than DDP, in 16 bits
        ("ddp", {}),
        ("zero2", {"processes": 1}),
        ("zero2", {"accumulation_steps": 1}),
        ("zero2", {"room": None}),
        ("zero2", {"room": 0}),
    ],
    ids=str,
)
def test_nothing_is_advised_where_nothing_is_gained_or_fits(name, changes):
    assert advice(name, **changes) is None


def test_an_engine_that_fits_is_named_where_the_one_in_use_does_not():
    work = workload(on_cpu=False, processes=8)
    sizes = {name: needs(name, work) for name in KINDS}
    assert sizes["zero3"] < sizes["zero2"] < sizes["ddp"]
    line = lighter_engine(KINDS["zero2"], work, sizes["zero3"])
    assert line.startswith(f"; ZeRO-3 needs {sizes['zero3'] / 2**30:.1f} GiB: ")
    assert "configs/zero3.yaml" in line
    assert "ZeRO-2 needs" in lighter_engine(KINDS["ddp"], work, sizes["zero2"])
    assert lighter_engine(KINDS["zero2"], work, 0) == ""
    assert lighter_engine(KINDS["ddp"], work.but(processes=1), 10**12) == ""


def test_a_configuration_that_has_no_name_is_compared_too():
    mixture = kind_of({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert faster_engine(mixture, workload(), 10**12).startswith("DDP would be faster")
    assert lighter_engine(mixture, workload(), 10**12).startswith("; DDP needs")


def test_with_muon_none_is_named_that_refuses_it():
    muon = replace(COUNTED, by_muon=N // 2)
    work = workload(on_cpu=False, processes=8, parameters=muon)
    room = needs("zero3_offload", work)
    assert "ZeRO-3, all on the CPU needs" in lighter_engine(
        KINDS["zero2"], work.but(parameters=COUNTED), room
    )
    assert lighter_engine(KINDS["zero2"], work, room) == ""
    assert [kind.config for kind in choices(work)] == ["ddp", "zero1", "zero2"]
