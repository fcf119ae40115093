"""The time that is given decides the model and the length of a run. Measuring is pretended."""

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import REPOSITORY, error_of
from test_preflight import TINY, ZERO_2

from lm.common.errors import TooLittleMemoryError
from lm.engine.deepspeed_config import read_config
from lm.engine.hardware import GIB
from lm.engine.memory import MARGIN, OVERHEAD, Workload, estimate
from lm.engine.strategy import strategies, strategy_of
from lm.launch import candidates, time_budget
from lm.launch.candidates import Candidates
from lm.launch.preflight import read_launch
from lm.launch.shell_variables import ShellVariables
from lm.launch.time_budget import TimeBudget
from lm.training.arguments import build_parser, parse_arguments
from lm.training.inputs import shapes_of
from lm.training.measurement import Speed
from lm.training.schedule import FROM_WEIGHTS
from model import LMConfig


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    """Runs a test in the repository, like run_accelerate.sh; then restores the environment."""
    monkeypatch.chdir(REPOSITORY)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    monkeypatch.setattr(os, "environ", clean)


@pytest.fixture
def flags(packed) -> list[str]:
    return [*TINY, "--data", str(packed)]


def bytes_for(batch_size: int, processes: int = 3) -> int:
    """Return the bytes that training the tiny model with this batch needs on a GPU under ZeRO-2."""
    config = LMConfig(dim=32, n_layers=1, n_heads=4, max_seq_len=32, vocab_size=400)
    args, _ = parse_arguments(["--batch_size", str(batch_size)])
    work = Workload(
        args=args,
        shapes=shapes_of(config, args),
        processes=processes,
        device=torch.device("cuda"),
        compiled=False,
    )
    needed = estimate(strategy_of(read_config("ds_config.json")), work)
    return int(needed.held + needed.working * MARGIN + OVERHEAD) + 1


@pytest.mark.parametrize(
    ("wanted", "missing_bytes", "rows"), [(768, 0, 768), (768, 2, 767), (10**4, 0, 1024)]
)
def test_a_micro_batch_fits_up_to_32768_tokens(flags, monkeypatch, wanted, missing_bytes, rows):
    free = bytes_for(wanted) - missing_bytes
    free = [free + GIB, free, free + GIB, 0]  # the last GPU is not used
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(candidates, "available_memory", lambda device, n: free[device.index])
    made = budget_of(flags, NUM_PROCESSES="3").candidates
    made.device = torch.device("cuda")
    settings = {"n_layers": 1, "dim": 32, "n_heads": 4, "max_seq_len": 32, "tie_embeddings": True}
    assert made.candidate(settings).rows == rows


@pytest.mark.parametrize("segmentations", [1, 20])
def test_a_small_text_keeps_one_matrix_for_both_ends(flags, segmentations):
    made = budget_of(flags).candidates
    made.inputs.train_set.segmentations = segmentations
    for model in made.models():
        assert model.settings["tie_embeddings"] is (segmentations > 1)
    made.typed["tie_embeddings"] = False
    assert not any(model.settings["tie_embeddings"] for model in made.models())


@pytest.mark.parametrize(
    ("n_first", "more", "noise"),
    [(9, {}, True), (0, {}, False), (9, {"source": 1}, False), (9, {"teacher": 1}, False)],
)
def test_a_new_model_gets_noise_in_a_text_in_several_segmentations(flags, n_first, more, noise):
    made = budget_of(flags).candidates
    model = made.models()[0]
    made.inputs.train_set.n_first = n_first
    made.inputs, made.fixed = replace(made.inputs, **more), "source" in more
    found = [made.flags(model, passes=passes).get("token_noise") for passes in (1.5, 6, 15, 30)]
    assert found == ([0.01, 0.04, 0.1, 0.1] if noise else [None] * 4)


@pytest.mark.parametrize(
    ("device", "pieces", "more", "tokens", "sampled"),
    [
        ("cpu", 8192, {}, 4096, 16),
        ("cpu", 8192, {}, 8192, 16),
        ("cpu", 8192, {}, 1024, 4),
        ("cpu", 8192, {}, 256, None),
        ("cpu", 4096, {}, 4096, None),
        ("cuda", 8192, {}, 4096, None),
        ("cpu", 8192, {"fixed": True}, 4096, None),
        ("cpu", 8192, {"teacher": 1}, 4096, None),
    ],
)
def test_a_new_model_on_a_cpu_samples_pieces_in_its_loss(
    flags, device, pieces, more, tokens, sampled
):
    made = budget_of(flags).candidates
    model = made.models()[0]
    model = replace(model, rows=tokens // model.length)
    made.device, made.fixed = torch.device(device), "fixed" in more
    config = replace(made.inputs.config, vocab_size=pieces)
    made.inputs = replace(made.inputs, config=config, teacher=more.get("teacher"))
    assert made.flags(model).get("sampled_softmax") == sampled


def test_a_model_that_does_not_fit_is_no_candidate(packed, monkeypatch):
    typed = ["--data", str(packed)]
    for free, largest in ((2**40, 2048), (2 * GIB, 512), (0, 64)):
        monkeypatch.setattr(candidates, "available_memory", lambda device, n, free=free: free)
        *_, last = budget_of(typed).candidates.models()
        assert last.settings["dim"] <= largest
        assert (last.settings["dim"] == 2048) is (free == 2**40)
        assert last.rows >= 1
    monkeypatch.setattr(candidates, "available_memory", lambda device, n: 3 * GIB)
    *_, last = budget_of([*typed, "--batch_size", "4096"]).candidates.models()
    assert last.rows == 4096  # typed
    assert last.settings["dim"] < 256


def test_one_process_measures_fewer_sequences_than_fit_into_a_share_and_scales(flags, monkeypatch):
    asked = pretend(monkeypatch)
    found = []
    for rows in (8, 2):
        made = budget_of(flags, NUM_PROCESSES="2").candidates
        model = replace(made.models()[0], rows=rows, rows_alone=2)
        found.append(made.measured(model).step)
    assert found[0] == pytest.approx(4 * found[1])
    assert [each["batch_size"] for each in asked] == [2, 2]


@pytest.mark.parametrize(("busy", "threads"), [(0, 4), (1, 3), (2, 2)])
def test_the_run_gets_the_number_of_threads_that_is_fastest_beside_other_programs(
    packed, monkeypatch, busy, threads
):
    pretend(monkeypatch, cores=4, busy=busy)
    found = budget_of(["--data", str(packed)]).flags()
    assert found["threads"] == threads
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "3")
    assert "threads" not in budget_of(["--data", str(packed)]).flags()
    del os.environ["OMP_NUM_THREADS"]
    typed = ["--data", str(packed), "--threads", "1"]
    assert "threads" not in budget_of(typed).flags()


@pytest.mark.parametrize("processes", [2, 4])
def test_the_processes_of_a_run_share_the_cores(flags, monkeypatch, processes):
    pretend(monkeypatch, cores=4)
    made = budget_of(flags, NUM_PROCESSES=str(processes))
    assert max(made.candidates.thread_counts) == 4 // processes


def test_a_busy_machine_trains_the_model_of_a_machine_with_fewer_cores(packed, monkeypatch):
    """Not a much smaller one, in steps that wait for threads."""
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    found = []
    for cores, busy in ((2, 1), (1, 0)):
        pretend(monkeypatch, cores=cores, busy=busy)
        found.append(budget_of(["--data", str(packed)]).flags())
    for name in ("dim", "n_layers", "batch_size"):
        assert found[0][name] == found[1][name]
    assert found[0]["max_steps"] == pytest.approx(found[1]["max_steps"], rel=0.02)


@pytest.mark.parametrize("minutes", ["0.5", "4", "10000"])
@pytest.mark.parametrize("slow", [1, 100])
def test_measuring_takes_at_most_a_fifth_of_the_time_or_two_measurements(
    packed, monkeypatch, minutes, slow
):
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    asked = pretend(monkeypatch, slow=slow, takes=10)
    budget_of(["--data", str(packed)], MINUTES=minutes).flags()
    searched = [each for each in asked if each["compile"] == "off"]
    most = min(0.2 * 60 * float(minutes), candidates.MOST_MEASURING)
    assert 1 <= len(searched) <= max(2, most // 10)


@pytest.mark.parametrize("minutes", ["0.5", "1", "4"])
def test_on_a_slow_machine_the_chosen_model_is_measured_at_last_and_in_time(
    packed, monkeypatch, minutes
):
    asked = pretend(monkeypatch, slow=100, takes=99)
    flags = ["--data", str(packed), "--compile", "off"]
    plan = budget_of(flags, MINUTES=minutes).plan()
    assert plan.speed.measured
    assert candidates.time.time() <= 0.2 * 60 * float(minutes)
    last = asked[-1]["dim"], asked[-1]["batch_size"]
    assert last == (plan.model.settings["dim"], plan.model.rows)


def test_the_time_for_measuring_is_taken_from_the_run(packed, monkeypatch):
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    steps = []
    for measuring in (0.0, 30.0):
        pretend(monkeypatch)
        made = budget_of(["--data", str(packed)])
        choose = time_budget.choose

        def slowly(*parts, made=made, seconds=measuring, choose=choose):
            made.started -= seconds
            return choose(*parts)

        monkeypatch.setattr(time_budget, "choose", slowly)
        steps.append(made.plan().seconds)
        monkeypatch.setattr(time_budget, "choose", choose)
    assert steps[0] - steps[1] == pytest.approx(60, rel=0.2)  # `choose` is called twice before


def test_a_model_that_fits_only_when_it_is_divided_is_not_measured(flags, monkeypatch):
    asked = pretend(monkeypatch)
    made = budget_of(flags, NUM_PROCESSES="2").candidates
    model = replace(made.models()[0], rows=8, rows_alone=0)
    assert not made.measured(model).measured
    assert asked == []


def test_what_is_not_measured_any_more_is_scaled_from_what_was(packed, monkeypatch):
    pretend(monkeypatch, slow=7)
    made = budget_of(["--data", str(packed)]).candidates
    small, *_, large = made.models()
    before = made.assumed(large).step / made.assumed(small).step
    measured = made.measured(small)
    made.until = 0
    assert made.measured(small) == measured
    scaled = made.measured(large)
    assert scaled.step / measured.step == pytest.approx(before)
    of_a_sequence = measured.sample * small.rows / large.rows
    assert scaled.sample / of_a_sequence == pytest.approx(before)
    assert not scaled.measured


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_compiling_is_not_compared_with_an_assumed_speed(packed, monkeypatch, wanted):
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    asked = pretend(monkeypatch, saves=0.2)
    made = budget_of(["--data", str(packed), "--compile", wanted], MINUTES="99")
    measured = made.candidates.measured
    only_compiled = lambda model, *more, **how: (  # noqa: E731
        measured(model, *more, **how) if how else made.candidates.assumed(model)
    )
    monkeypatch.setattr(made.candidates, "measured", only_compiled)
    assert made.flags().get("compile") is None  # typed, or left to the training program
    assert [each["compile"] for each in asked] == (["on"] if wanted == "on" else [])


def test_memory_that_runs_out_ends_the_search_for_a_larger_model(packed, monkeypatch):
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    asked = pretend(monkeypatch, slow=0.01)
    measure = candidates.measure

    def small_only(train, arguments, flags, threads, seconds):
        if flags["dim"] > 96 or flags["batch_size"] > 8:
            raise TooLittleMemoryError("out of memory")
        return measure(train, arguments, flags, threads, seconds)

    monkeypatch.setattr(candidates, "measure", small_only)
    made = budget_of(["--data", str(packed)], MINUTES="999")
    found = made.flags()
    assert (found["dim"], found["batch_size"]) == (96, 8)
    assert asked
    made = budget_of(["--data", str(packed), "--dim", "128"], MINUTES="999")
    assert "out of memory" in error_of(made.flags, error=TooLittleMemoryError)


def test_after_memory_ran_out_the_smaller_micro_batch_is_measured_whatever_the_time(
    packed, monkeypatch
):
    asked = pretend(monkeypatch)
    measure = candidates.measure
    made = budget_of(["--data", str(packed)])

    def little_memory(train, arguments, flags, threads, seconds):
        made.candidates.until = 0.0
        if flags["batch_size"] > 4:
            raise TooLittleMemoryError("out of memory")
        return measure(train, arguments, flags, threads, seconds)

    monkeypatch.setattr(candidates, "measure", little_memory)
    made.plan()
    assert asked[0]["batch_size"] == 4


@pytest.mark.parametrize(
    ("minutes", "saves", "compiles"),
    [
        ("4", 0.2, True),
        ("4", 0.0, False),  # measured, but not faster
        ("0.5", 0.2, None),  # too short to be tried
    ],
)
def test_a_run_compiles_if_this_saves_time(packed, monkeypatch, minutes, saves, compiles):
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    asked = pretend(monkeypatch, saves=saves)
    flags = budget_of(["--data", str(packed)], MINUTES=minutes).flags()
    assert flags["compile"] == ("on" if compiles else "off")
    tried = [each for each in asked if each["compile"] == "on"]
    assert len(tried) == (compiles is not None)
    assert all(each["batch_size"] == flags["batch_size"] for each in tried)


@pytest.mark.parametrize(("waited", "counts"), [(20, True), (130, False)])
def test_a_long_preparation_does_not_count(packed, monkeypatch, capsys, waited, counts):
    """A text or conversations: the preparation takes no CPU time of this process."""
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: time.time() - waited - 5)
    monkeypatch.setattr(time, "process_time", lambda: 5.0)
    made = budget_of(["--data", str(packed)], started=None)
    left = 240 - 5 - 2 * time_budget.LAUNCH_SHARE - waited * counts
    assert made.task().seconds == pytest.approx(left, abs=1)
    assert ("the 4 min begin now" in capsys.readouterr().out) is not counts


def budget_of(flags: list[str], started: float | None = 0.0, **environ: str) -> TimeBudget:
    """Return the `TimeBudget` of a command that started so many seconds ago (None: when it did)."""
    request = ShellVariables({"CONFIG": ZERO_2} | environ)
    read_launch(request.config)
    typed = vars(build_parser(request.arguments).parse_args(flags))
    made = TimeBudget(Candidates(request, typed), loading=2.0)
    if started is not None:
        made.started = time.time() - started
    return made


def pretend(
    monkeypatch,
    slow: float = 1.0,
    cores: int = 2,
    busy: int = 0,
    saves: float = 0.0,
    takes: float = 0.0,
) -> list[dict]:
    """Pretend that this is a machine with `cores`, of which other programs use `busy`.

    A step takes 20 ms, and time in proportion to its tokens and to the parameters of the model.
    Threads beyond the free cores make it ten times as slow. A slow machine takes `slow` times as
    long. A compiled step takes the share `saves` less. A measurement takes `takes` seconds at most.
    Return a list to which each measurement appends its flags."""
    asked, now = [], [0.0]

    def measure(train, arguments, flags, threads, seconds):
        asked.append(flags)
        now[0] += min(takes, seconds)
        tokens = flags["batch_size"] * flags["max_seq_len"]
        work = slow * (0.02 + 1e-11 * tokens * (12 * flags["n_layers"] * flags["dim"] ** 2 + 5e5))
        work *= 1 - saves * (flags["compile"] == "on")
        free = max(1, cores - busy)
        times = {n: work / n if n <= free else 10 * work / free for n in threads or (free,)}
        best = min(times, key=times.get)
        sample = times[best] / flags["batch_size"] / 3
        return Speed(times[best], sample, best if threads else None)

    monkeypatch.setattr(candidates, "measure", measure)
    monkeypatch.setattr(candidates, "available_cores", lambda: cores)
    if takes:
        monkeypatch.setattr(candidates.time, "time", lambda: now[0])
    monkeypatch.setattr(time_budget, "obstacle", lambda device: None)
    return asked


def test_more_minutes_give_more_steps_and_the_chosen_model_is_printed(packed, monkeypatch, capsys):
    asked = pretend(monkeypatch)
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    chosen = [budget_of(["--data", str(packed)], MINUTES=m).flags() for m in ("1", "99")]
    assert 200 <= chosen[0]["max_steps"] < chosen[1]["max_steps"]
    said = capsys.readouterr().out
    assert f"recipe: 1 min for {chosen[0]['n_layers']} layers of dim {chosen[0]['dim']}" in said
    assert "4 min would train" in said
    assert {flags["deepspeed"] for flags in asked} == {"ds_config.json"}
    assert {flags["data"] for flags in asked} == {str(packed)}


def test_a_text_that_is_too_small_for_the_time_is_reported(packed, monkeypatch, capsys):
    pretend(monkeypatch)
    flags = budget_of(["--data", str(packed)], MINUTES="10000").flags()
    assert "more text would help" in capsys.readouterr().out
    assert flags["max_steps"] < 10_000


def test_the_dial_and_the_run_count_the_same_flops_with_a_teacher(packed):
    """Otherwise the time that a plan expects would be wrong."""
    made = budget_of(["--data", str(packed)]).candidates
    alone = made.inputs.flops_per_token
    teacher = SimpleNamespace(shapes=made.inputs.shapes, zero=None)
    made.inputs, made.fixed = replace(made.inputs, teacher=teacher), True
    assert made.candidate({}).flops == made.inputs.flops_per_token > alone


def test_nothing_is_measured_if_the_typed_flags_decide_the_steps(flags, monkeypatch):
    asked = pretend(monkeypatch)
    typed = [*flags, "--max_steps", "7", "--learning_rate", "0.5"]
    added = budget_of(typed).flags()
    assert asked == []
    assert not added.keys() & {"max_steps", "dim", "n_layers"}
    assert not added.keys() & FROM_WEIGHTS.keys()  # a typed rate is that of all layers
    assert added["muon_learning_rate"] == 0.03


def test_several_machines_choose_the_same_flags_without_measuring(packed, monkeypatch):
    asked = pretend(monkeypatch)
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    place = {"NUM_MACHINES": "2", "MASTER_ADDR": "127.0.0.1"}
    monkeypatch.setattr(os, "environ", os.environ | place)
    typed, chosen = ["--data", str(packed)], []
    for rank in ("0", "1"):
        place["MACHINE_RANK"] = rank
        place |= {"NUM_PROCESSES": "4", "CONFIG": "configs/multi_node.yaml"}
        made = budget_of(typed, **place)
        made.started -= 30 * int(rank)  # the second machine began earlier
        chosen.append(made.flags())
    assert chosen[0] == chosen[1]
    assert asked == []


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "zero2_offload"])
def test_engines_that_support_muon_get_muon(name, flags, monkeypatch):
    pretend(monkeypatch)
    strategy = next(strategy for strategy in strategies() if strategy.config == name)
    made = budget_of([*flags, "--max_steps", "9"], CONFIG=f"configs/{name}.yaml")
    assert made.flags()["optimizer"] == ("muon" if strategy.takes_muon else "adamw")
    typed = [*flags, "--max_steps", "9", "--optimizer", "adamw"]
    added = budget_of(typed, CONFIG=f"configs/{name}.yaml").flags()
    assert "muon_learning_rate" not in added


def test_a_larger_batch_has_a_higher_rate_beside_muon(packed, monkeypatch):
    pretend(monkeypatch)
    typed = ["--data", str(packed), "--max_steps", "9", "--accumulation_steps"]
    found = [budget_of([*typed, str(n)]).flags() for n in (1, 4)]
    assert found[1]["learning_rate"] == pytest.approx(2 * found[0]["learning_rate"], rel=0.05)
