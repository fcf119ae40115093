"""The time that is given decides the model and the length of a run. Measuring is pretended."""

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import error_of
from test_preflight import TINY, ZERO_2, in_the_repository  # noqa: F401  a fixture of every test

from lm.common.errors import TooLittleMemoryError
from lm.engine.hardware import GIB
from lm.launch import candidates, time_budget
from lm.launch.candidates import Candidates
from lm.launch.preflight import read_launch
from lm.launch.shell_variables import ShellVariables
from lm.launch.time_budget import TimeBudget
from lm.training.arguments import build_parser
from lm.training.measurement import Speed
from lm.training.schedule import FROM_WEIGHTS


@pytest.fixture
def budget_of(packed):
    """Makes the `TimeBudget` of a command with these flags that starts now (started=None: that has
    started when this process did)."""

    def budget_of(*flags: str, started=0.0, preparing=0.0, **environ: str) -> TimeBudget:
        request = ShellVariables({"CONFIG": ZERO_2} | environ)
        read_launch(request.config)
        typed = build_parser(request.arguments).parse_args(["--data", str(packed), *flags])
        made = TimeBudget(Candidates(request, vars(typed)), 2.0, preparing)
        if started is not None:
            made.started = time.time() - started
        return made

    return budget_of


@pytest.fixture
def pretend(monkeypatch):
    """Pretends that this is a machine with `cores`, of which other programs use `busy`.

    A step takes 20 ms, and time in proportion to its tokens and to the parameters of the model.
    Threads beyond the free cores make it ten times as slow. A slow machine takes `slow` times as
    long. A compiled step takes the share `saves` less. A measurement takes `takes` seconds at most.
    The text may be read `passes` times. Returns a list to which each measurement appends its
    flags."""

    def pretend(slow=1.0, cores=2, busy=0, saves=0.0, takes=0.0, passes=1e9) -> list[dict]:
        asked, now = [], [0.0]

        def measure(train, arguments, flags, threads, seconds):
            asked.append(flags)
            now[0] += min(takes, seconds)
            tokens = flags["batch_size"] * flags["max_seq_len"]
            parameters = 12 * flags["n_layers"] * flags["dim"] ** 2 + 5e5
            work = slow * (0.02 + 1e-11 * tokens * parameters)
            work *= 1 - saves * (flags["compile"] == "on")
            free = max(1, cores - busy)
            times = {n: work / n if n <= free else 10 * work / free for n in threads or (free,)}
            best = min(times, key=times.get)
            sample = times[best] / flags["batch_size"] / 3
            one = times[best] * (0.02 + 1e-11 * flags["max_seq_len"] * parameters)
            one /= 0.02 + 1e-11 * tokens * parameters
            return Speed(times[best], one, sample, best if threads else None)

        monkeypatch.setattr(candidates, "measure", measure)
        monkeypatch.setattr(candidates, "available_cores", lambda: cores)
        if takes:
            monkeypatch.setattr(candidates.time, "time", lambda: now[0])
        monkeypatch.setattr(time_budget, "obstacle", lambda device: None)
        monkeypatch.setattr(time_budget, "MOST_PASSES", passes)
        return asked

    return pretend


@pytest.mark.parametrize(("fitting", "rows"), [(768, 768), (10**4, 1024)])
def test_a_micro_batch_fits_up_to_32768_tokens(budget_of, monkeypatch, fitting, rows):
    free = [fitting + 1, fitting, fitting + 1, 0]  # the last GPU is not used
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(candidates, "available_memory", lambda device, n: free[device.index])
    monkeypatch.setattr(
        candidates, "largest_batch", lambda strategy, work, free: free * (work.processes == 3)
    )
    made = budget_of(*TINY, NUM_PROCESSES="3").candidates
    made.device = torch.device("cuda")
    assert made.models()[0].rows == rows


@pytest.mark.parametrize("segmentations", [1, 20])
def test_a_small_text_keeps_one_matrix_for_both_ends(budget_of, segmentations):
    made = budget_of(*TINY).candidates
    made.inputs.train_set.segmentations = segmentations
    for model in made.models():
        assert model.settings["tie_embeddings"] is (segmentations > 1)
    made.typed["tie_embeddings"] = False
    assert not any(model.settings["tie_embeddings"] for model in made.models())


@pytest.mark.parametrize(
    ("n_first", "more", "noise"),
    [(9, {}, True), (0, {}, False), (9, {"source": 1}, False), (9, {"teacher": 1}, False)],
)
def test_a_new_model_gets_noise_in_a_text_in_several_segmentations(budget_of, n_first, more, noise):
    made = budget_of(*TINY).candidates
    model = made.models()[0]
    made.inputs.train_set.n_first = n_first
    made.inputs, made.fixed = replace(made.inputs, **more), "source" in more
    found = [made.flags(model, passes=passes).get("token_noise") for passes in (1.5, 6, 15, 30)]
    assert found == ([0.01, 0.04, 0.1, 0.1] if noise else [None] * 4)


@pytest.mark.parametrize(
    ("device", "pieces", "more", "tokens", "sampled"),
    [
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
    budget_of, device, pieces, more, tokens, sampled
):
    made = budget_of(*TINY).candidates
    model = made.models()[0]
    model = replace(model, rows=tokens // model.length)
    made.device, made.fixed = torch.device(device), "fixed" in more
    config = replace(made.inputs.config, vocab_size=pieces)
    made.inputs = replace(made.inputs, config=config, teacher=more.get("teacher"))
    assert made.flags(model).get("sampled_softmax") == sampled


def test_a_model_that_does_not_fit_is_no_candidate(budget_of, monkeypatch):
    for free, largest in ((2**40, 2048), (2 * GIB, 512), (0, 64)):
        monkeypatch.setattr(candidates, "available_memory", lambda device, n, free=free: free)
        *_, last = budget_of().candidates.models()
        assert last.settings["dim"] <= largest
        assert (last.settings["dim"] == 2048) is (free == 2**40)
        assert last.rows >= 1
    monkeypatch.setattr(candidates, "available_memory", lambda device, n: 3 * GIB)
    *_, last = budget_of("--batch_size", "4096").candidates.models()
    assert last.rows == 4096  # typed
    assert last.settings["dim"] < 256


def test_one_process_measures_the_sequences_that_fit_into_it_and_scales_the_time(
    budget_of, pretend, monkeypatch
):
    """A model that fits only when it is divided is not measured, and not compared with compiled
    steps: the training program decides."""
    asked = pretend(cores=4)
    speeds = []
    for alone in (2, 8):
        made = budget_of(*TINY, NUM_PROCESSES="2").candidates
        speeds.append(made.measure(replace(made.models()[0], rows=8, rows_alone=alone)).step)
        assert made.thread_counts == (2, 1)  # the processes share the cores
    assert [each["batch_size"] for each in asked] == [2, 8]
    assert speeds[0] == pytest.approx(speeds[1])
    made = budget_of(NUM_PROCESSES="2", MINUTES="99")
    divided = [replace(model, rows_alone=0) for model in made.candidates.models()]
    monkeypatch.setattr(made.candidates, "models", lambda: divided)
    assert "compile" not in made.flags()
    assert len(asked) == 2


@pytest.mark.parametrize(("busy", "threads"), [(0, 4), (1, 3), (2, 2)])
def test_the_run_gets_the_number_of_threads_that_is_fastest_beside_other_programs(
    budget_of, pretend, monkeypatch, busy, threads
):
    pretend(cores=4, busy=busy)
    assert budget_of().flags()["threads"] == threads
    assert "threads" not in budget_of("--threads", "1").flags()
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "3")
    assert "threads" not in budget_of().flags()


@pytest.mark.parametrize("minutes", ["0.5", "4", "10000"])
@pytest.mark.parametrize(("slow", "takes"), [(1, 10), (100, 10), (100, 99)])
def test_measuring_takes_a_fifth_of_the_time_and_ends_with_the_chosen_model(
    budget_of, pretend, minutes, slow, takes
):
    asked = pretend(slow=slow, takes=takes)
    plan = budget_of("--compile", "off", MINUTES=minutes).plan()
    assert plan.speed.measured
    assert time.time() <= min(0.2 * 60 * float(minutes), candidates.MOST_MEASURING)
    assert plan.seconds <= 60 * float(minutes) - time.time()  # the run has the rest of the time
    measured = [(each["dim"], each["batch_size"]) for each in asked]
    assert (plan.model.settings["dim"], plan.model.rows) in measured


def test_what_is_not_measured_is_scaled_from_what_was(budget_of, pretend):
    pretend(slow=7)
    made = budget_of().candidates
    small, *_, large = made.models()
    before = made.speed(large).step / made.speed(small).step
    measured = made.measure(small)
    assert made.speed(small) == measured
    scaled = made.speed(large)
    assert scaled.step / measured.step == pytest.approx(before)
    of_a_sequence = measured.sample * small.rows / large.rows
    assert scaled.sample / of_a_sequence == pytest.approx(before)
    assert not scaled.measured


def test_after_a_good_guess_nothing_else_is_measured(budget_of, pretend):
    asked = pretend()
    made = budget_of("--compile", "off", MINUTES="99")
    best = made.plan().model
    guess = budget_of("--compile", "off", MINUTES="99")
    guess.candidates.known = dict(made.candidates.known)
    asked.clear()
    assert guess.plan().model == best
    assert asked == []


def test_steps_that_run_out_of_memory_get_fewer_sequences_whatever_the_time(
    budget_of, pretend, monkeypatch
):
    asked = pretend()
    measure = candidates.measure
    most = {"batch_size": 5, "dim": 128}

    def little_memory(train, arguments, flags, threads, seconds):
        made.candidates.until = 0.0
        if any(flags[name] > value for name, value in most.items()):
            raise TooLittleMemoryError("out of memory")
        return measure(train, arguments, flags, threads, seconds)

    monkeypatch.setattr(candidates, "measure", little_memory)
    made = budget_of("--compile", "off", MINUTES="10000")
    plan = made.plan()
    assert (plan.model.settings["dim"], plan.model.rows) == (128, 4)
    assert {each["batch_size"] for each in asked} == {4}
    for typed in ([], ["--batch_size", "16"]):
        most["batch_size"] = 5 if typed else 0
        made = budget_of(*typed)
        assert error_of(made.plan, error=TooLittleMemoryError) == "out of memory"


@pytest.mark.parametrize(
    ("minutes", "saves", "compiles"),
    [
        ("4", 0.2, True),
        ("4", 0.0, False),  # measured, but not faster
        ("0.5", 0.2, None),  # too short to be tried
    ],
)
def test_a_run_compiles_if_this_saves_time(budget_of, pretend, minutes, saves, compiles):
    asked = pretend(saves=saves)
    flags = budget_of(MINUTES=minutes).flags()
    assert flags["compile"] == ("on" if compiles else "off")
    tried = [each for each in asked if each["compile"] == "on"]
    assert len(tried) == (compiles is not None)
    assert all(each["batch_size"] == flags["batch_size"] for each in tried)


@pytest.mark.parametrize(("preparing", "counts"), [(20, True), (130, False)])
def test_a_long_preparation_does_not_count(budget_of, monkeypatch, capsys, preparing, counts):
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: time.time() - preparing - 5)
    made = budget_of(started=None, preparing=preparing)
    left = 240 - 5 - 2 * time_budget.LAUNCH_SHARE - preparing * counts
    assert made.task().seconds == pytest.approx(left, abs=1)
    assert ("the 4 min begin now" in capsys.readouterr().out) is not counts


def test_more_minutes_give_more_steps_and_the_chosen_model_is_printed(
    budget_of, pretend, packed, capsys
):
    asked = pretend()
    chosen = [budget_of(MINUTES=minutes).flags() for minutes in ("1", "99")]
    assert 200 <= chosen[0]["max_steps"] < chosen[1]["max_steps"]
    said = capsys.readouterr().out
    assert f"recipe: 1 min for {chosen[0]['n_layers']} layers of dim {chosen[0]['dim']}" in said
    assert "4 min would train" in said
    assert {flags["deepspeed"] for flags in asked} == {"ds_config.json"}
    assert {flags["data"] for flags in asked} == {str(packed)}


def test_a_text_that_is_too_small_for_the_time_is_reported(budget_of, pretend, capsys):
    pretend(passes=time_budget.MOST_PASSES)
    flags = budget_of(MINUTES="10000").flags()
    assert "more text would help" in capsys.readouterr().out
    assert flags["max_steps"] < 10_000


def test_the_dial_and_the_run_count_the_same_flops_with_a_teacher(budget_of):
    """Otherwise the time that a plan expects would be wrong."""
    made = budget_of().candidates
    alone = made.inputs.flops_per_token
    teacher = SimpleNamespace(shapes=made.inputs.shapes, zero=None)
    made.inputs, made.fixed = replace(made.inputs, teacher=teacher), True
    assert made.candidate({}).flops == made.inputs.flops_per_token > alone


def test_nothing_is_measured_if_the_typed_flags_decide_the_steps(budget_of, pretend):
    asked = pretend()
    added = budget_of(*TINY, "--max_steps", "7", "--learning_rate", "0.5").flags()
    assert asked == []
    assert not added.keys() & {"max_steps", "dim", "n_layers"}
    assert not added.keys() & FROM_WEIGHTS.keys()  # a typed rate is that of all layers
    assert added["muon_learning_rate"] == 0.03


def test_a_machine_that_starts_slowly_trains_for_a_quarter_of_the_time(budget_of, pretend, capsys):
    pretend()
    made = budget_of(started=600)
    assert made.task().seconds == 60
    made.plan()
    assert "the run will end late" in capsys.readouterr().out


def test_several_machines_choose_the_same_flags_without_measuring(budget_of, pretend, monkeypatch):
    asked = pretend()
    monkeypatch.setitem(os.environ, "NUM_MACHINES", "2")  # for the launcher's file
    place = {"NUM_MACHINES": "2", "MASTER_ADDR": "127.0.0.1", "NUM_PROCESSES": "4"}
    place["CONFIG"] = "configs/multi_node.yaml"
    chosen = [
        budget_of(started=30.0 * rank, MACHINE_RANK=str(rank), **place).flags() for rank in (0, 1)
    ]
    assert chosen[0] == chosen[1]
    assert asked == []


@pytest.mark.parametrize(("name", "optimizer"), [("zero2", "muon"), ("zero2_offload", "adamw")])
def test_engines_that_support_muon_get_muon(budget_of, name, optimizer):
    typed = ["--max_steps", "9", *TINY]
    assert budget_of(*typed, CONFIG=f"configs/{name}.yaml").flags()["optimizer"] == optimizer
    added = budget_of(*typed, "--optimizer", "adamw", CONFIG=f"configs/{name}.yaml").flags()
    assert "muon_learning_rate" not in added


def test_a_larger_batch_has_a_higher_rate_beside_muon(budget_of):
    found = [
        budget_of("--max_steps", "9", "--accumulation_steps", n).flags()["learning_rate"]
        for n in ("1", "4")
    ]
    assert found[1] == pytest.approx(2 * found[0], rel=0.05)
