import dataclasses
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from conftest import REPOSITORY, clean_environment
from test_pins import lines_of, names_in

from benchmarks import contenders, session, throughput, worker
from benchmarks.contenders import Contender, all_contenders, environments, obstacle, select
from benchmarks.ours import command_line
from benchmarks.peers import PEERS, PeerStep
from benchmarks.report import (
    Result,
    SizeReport,
    closing,
    closing_line,
    ratio,
    size_json,
    size_table,
)
from benchmarks.session import Plan, Session
from benchmarks.team import Team, TeamError
from benchmarks.work import SIZES, VOCAB_SIZE
from model import Transformer
from training.errors import UsageError

TEST = dataclasses.replace(SIZES["test"], dtype="float32")
MILLIONS = {"26m": 25.83, "104m": 104.03, "360m": 361}
OURS, OURS_COMPILED = Contender("ours", False), Contender("ours", True)
LLAMA, LLAMA_COMPILED = Contender("transformers", False), Contender("transformers", True)


@pytest.fixture(params=PEERS)
def peer(request):
    pytest.importorskip(request.param)
    return request.param


# The work


@pytest.mark.parametrize(("size", "millions"), MILLIONS.items())
def test_sizes_have_the_parameters_of_their_names(size, millions):
    assert SIZES[size].counts[0] / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize("size", MILLIONS)
def test_a_peer_has_exactly_our_number_of_parameters(peer, size):
    with torch.device("meta"):
        model = PEERS[peer].build(SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == SIZES[size].counts[0]


def test_everybody_gets_the_same_tokens_and_each_rank_others():
    cpu = torch.device("cpu")
    first, again, other = (TEST.batches(rank, cpu) for rank in (0, 0, 1))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    tokens, targets = first[0]
    assert tokens.shape == targets.shape == (TEST.batch_size, TEST.seq_len)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def halves(weight, heads):
    """Rows of each head reordered from rotated pairs (0, 1), (2, 3) to (0, d/2), (1, d/2 + 1)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def give_weights(ours, model, peer, config):
    """Our weights under the peer's names; everything must have been given at the end."""
    given = {}
    for i, layer in enumerate(ours.layers):
        attention, mlp = layer.attention, layer.feed_forward
        wq, wk = (
            halves(w.weight, n)
            for w, n in zip(
                (attention.wq, attention.wk), (config.n_heads, config.n_kv_heads), strict=True
            )
        )
        wv, wo = attention.wv.weight, attention.wo.weight
        if peer == "litgpt":
            names = {
                "norm_1": layer.attention_norm,
                "norm_2": layer.ffn_norm,
                "mlp.fc_1": mlp.w1,
                "mlp.fc_2": mlp.w3,
                "mlp.proj": mlp.w2,
            }
            given |= {f"transformer.h.{i}.{k}.weight": v.weight for k, v in names.items()}
            given[f"transformer.h.{i}.attn.qkv.weight"] = torch.cat((wq, wk, wv))
            given[f"transformer.h.{i}.attn.proj.weight"] = wo
        else:
            names = {
                "input_layernorm": layer.attention_norm,
                "mlp.gate_proj": mlp.w1,
                "post_attention_layernorm": layer.ffn_norm,
                "mlp.up_proj": mlp.w3,
                "mlp.down_proj": mlp.w2,
            }
            given |= {f"model.layers.{i}.{k}.weight": v.weight for k, v in names.items()}
            for letter, weight in zip("qkvo", (wq, wk, wv, wo), strict=True):
                given[f"model.layers.{i}.self_attn.{letter}_proj.weight"] = weight
    embedding, norm = (
        ("transformer.wte", "transformer.ln_f")
        if peer == "litgpt"
        else ("model.embed_tokens", "model.norm")
    )
    table = ours.tok_embeddings.weight
    given |= {f"{embedding}.weight": table, "lm_head.weight": table}
    given[f"{norm}.weight"] = ours.norm.weight
    model.load_state_dict(given, strict=True)


def test_a_peer_with_our_weights_has_our_loss_and_our_gradient(peer):
    torch.manual_seed(0)
    ours, model = Transformer(TEST.config), PEERS[peer].build(TEST)
    give_weights(ours, model, peer, TEST.config)
    tokens, targets = TEST.batches(0, torch.device("cpu"))[0]
    our_loss = ours(tokens, targets).loss
    loss = PEERS[peer].loss(model, tokens, targets, torch.enable_grad())
    assert loss.item() == pytest.approx(our_loss.item(), abs=1e-5)
    our_loss.backward()
    loss.backward()
    norms = [
        torch.nn.utils.get_total_norm(p.grad for p in m.parameters()).item() for m in (ours, model)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_a_peers_step_trains_fp32_weights_under_autocast_from_the_untrained_loss(peer):
    options = {"peer": peer, "compiled": False, "allocator": "default"}
    step = PeerStep(dataclasses.replace(TEST, dtype="bfloat16", accumulation_steps=2), options)
    assert {p.dtype for p in step._weights} == {torch.float32}
    before = [p.detach().clone() for p in step._weights]
    step.step()
    assert step.loss() == pytest.approx(math.log(VOCAB_SIZE), abs=0.1)
    assert not any(torch.equal(a, b) for a, b in zip(before, step._weights, strict=True))


def test_ours_is_asked_for_the_same_work():
    from training.arguments import parse_arguments

    words = command_line(SIZES["104m"], False, "--use_flash_attn --seed 7")
    args, settings = parse_arguments(words)
    assert (args.batch_size, args.grad_clip, args.dtype) == (8, 1.0, "bfloat16")
    assert (args.seed, settings["use_flash_attn"]) == (7, True)
    config = SIZES["104m"].config
    assert {name: getattr(config, name) for name in ("dim", "n_layers", "n_heads")} == {
        name: settings[name] for name in ("dim", "n_layers", "n_heads")
    }


# Contenders


def names_of(found):
    return [contender.name for contender in found]


def test_contenders_are_chosen_by_name_and_by_group():
    everybody = all_contenders(2, has_gpu=False, allocator="both")
    assert len(set(names_of(everybody))) == len(everybody) == 16
    assert names_of(select(everybody, ["litgpt-eager+allocator", "ours-zero2-compiled"])) == [
        "ours-zero2-compiled",
        "litgpt-eager+allocator",
    ]
    assert {c.family for c in select(everybody, ["peers"])} == {"transformers", "litgpt"}
    assert {c.compiled for c in select(everybody, ["compiled"])} == {True}
    assert len(select(everybody, ["all"])) == len(everybody)
    with pytest.raises(UsageError, match=r"'nanogpt' is none of all, compiled, .*zero2"):
        select(everybody, ["nanogpt"])


def test_a_gpu_has_no_allocator_variants():
    on_gpu = all_contenders(1, has_gpu=True, allocator="both")
    assert not [name for name in names_of(on_gpu) if "allocator" in name]
    only = all_contenders(1, has_gpu=False, allocator="ours")
    assert all("+allocator" in name for name in names_of(only) if not name.startswith("ours"))


def test_what_cannot_run_says_why_in_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert "C++ compiler" in obstacle(LLAMA_COMPILED, 0)
    assert obstacle(LLAMA, 0) is None
    monkeypatch.setattr(contenders, "find_spec", lambda name: None)
    assert "pip install --no-deps -r" in obstacle(Contender("litgpt", False), 0)
    monkeypatch.setattr(contenders, "can_compile", lambda: False)
    assert "no --compile" in obstacle(OURS_COMPILED, 0)
    assert "--processes 2" in obstacle(Contender("ours", False, "ddp"), 0)
    assert obstacle(Contender("ours", False, "zero2"), 0) is None
    assert "4 processes for 2 GPUs" in obstacle(Contender("ours", False, "zero2", processes=4), 2)


def test_ranks_get_what_a_launcher_would_set(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("WORLD_SIZE", "8")
    zero1 = Contender("ours", False, "zero1", processes=2)
    first, second = environments(zero1, 1234, tmp_path, fresh=True)
    assert [first["RANK"], second["RANK"], second["LOCAL_RANK"]] == ["0", "1", "1"]
    assert (first["WORLD_SIZE"], first["MASTER_PORT"]) == ("2", "1234")
    assert "ACCELERATE_USE_CPU" not in first
    config = json.loads(Path(first["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
    assert config["zero_optimization"]["stage"] == 1
    assert first["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    (single,) = environments(OURS, 1234, tmp_path, fresh=False)
    assert not {"RANK", "WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED"} & set(single)
    assert single.get("TORCHINDUCTOR_CACHE_DIR") == os.environ.get("TORCHINDUCTOR_CACHE_DIR")


# Ratios and tables


def result(contender, seconds, tokens=1000):
    return Result(contender, tokens, first_step_seconds=2.5, step_seconds=seconds, peak_bytes=2**30)


def report(*results, **missing):
    return SizeReport(
        "26m", SIZES["26m"], results[0].name, list(results), missing,
        measured_peaks=[1e12, 3e12, 2e12], peak_shape="1 × 2 × 3", sheet_peak=None,
        devices_shared=True,
    )  # fmt: skip


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians():
    # The machine is three times as slow in the last round, for both.
    ours = result(OURS, {1: 1.0, 2: 1.1, 3: 3.0})
    peer = result(LLAMA, {1: 1.5, 2: 1.76, 3: 4.8})
    assert ratio(ours, peer) == pytest.approx((1.6, 1.5, 1.6))
    twice_the_tokens = result(Contender("ours", False, "ddp", processes=2), {3: 3.0}, tokens=2000)
    assert ratio(twice_the_tokens, peer) == pytest.approx((3.2, 3.2, 3.2))
    assert ratio(result(OURS, {7: 1.0}), peer) is None


def test_the_closing_line_takes_the_fastest_of_each_side_and_compares_allocators_apart():
    found = report(
        result(OURS, {1: 1.0, 2: 1.0}),
        result(OURS_COMPILED, {1: 0.5, 2: 0.5}),
        result(Contender("ours", True, "zero2", processes=2), {1: 0.1, 2: 0.1}),
        result(LLAMA, {1: 1.2, 2: 1.2}),
        result(LLAMA_COMPILED, {1: 0.8, 2: 0.82}),
        result(Contender("litgpt", True, allocator="ours"), {1: 0.75, 2: 0.76}),
    )
    ends = closing(found)
    assert ends["as_users_run_it"]["ratio"] == pytest.approx(1.62)
    assert closing_line(found) == (
        "26m, ours / fastest peer: 1.62 (ours-compiled / transformers-compiled), "
        "same allocator 1.51 (litgpt-compiled+allocator)"
    )


def test_without_peers_the_closing_line_says_so():
    assert "n/a" in closing_line(report(result(OURS, {1: 1.0})))


def test_contenders_that_never_met_are_compared_by_way_of_the_baseline():
    # ours-compiled was measured while the machine was half as fast.
    found = report(
        result(OURS, {1: 1.0, 2: 2.0}), result(OURS_COMPILED, {2: 1.0}), result(LLAMA, {1: 1.0})
    )
    assert closing(found)["as_users_run_it"]["ratio"] == pytest.approx(2.0)


def test_the_table_has_every_contender_and_the_reason_of_every_missing_one():
    found = report(result(OURS, {1: 0.5}), result(LLAMA, {1: 1.0}), litgpt="not installed")
    lines = size_table(found).splitlines()
    header, ours, peer = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    )
    ours, peer = dict(zip(header, ours, strict=True)), dict(zip(header, peer, strict=True))
    assert ours["tokens/s"].startswith("2,000 ")
    assert (ours["against ours-eager"], peer["against ours-eager"][:5]) == ("1", "0.500")
    teraflops = 2000 * SIZES["26m"].counts[1] / 1e12
    assert float(ours["TFLOP/s"]) == pytest.approx(teraflops, rel=1e-2)
    assert ours["of measured peak"] == f"{teraflops / 2:.1%}"  # the median of 1, 2 and 3
    assert (ours["memory, GiB"], ours["first step, s"]) == ("1.00", "2.5")
    assert "- litgpt: not installed" in lines
    assert json.loads(json.dumps(size_json(found)))["results"][1]["name"] == "transformers-eager"


def test_different_numbers_of_threads_are_said():
    found = report(result(OURS, {1: 0.5}), result(LLAMA, {1: 1.0}))
    assert "NOT ALIKE" not in size_table(found)
    found.results[0].threads = 2
    assert "threads of ours-eager 2, transformers-eager 0" in size_table(found)


def test_mfu_is_the_share_of_the_data_sheet_where_that_is_known():
    found = report(
        result(OURS, {1: 0.5}), result(Contender("ours", False, "ddp", "default", 2), {1: 0.5})
    )
    found.sheet_peak, found.devices_shared = 4e12, False
    single, ddp = size_json(found)["results"]
    assert single["share_of_peak"] == pytest.approx(single["flops"] / 4e12)
    assert ddp["share_of_peak"] == pytest.approx(single["share_of_peak"] / 2)
    assert "| MFU |" in size_table(found)


# Turns


class FakeTeam:
    """A contender that takes a second per step and a unit of memory; fails where it is told to."""

    alive: ClassVar[int]
    told: ClassVar[list]  # (name, command) in order
    fails_at: ClassVar[dict]  # (name, command) → reason

    def __init__(self, environments, folder):
        self.name, self.started = folder.name, 0.0
        FakeTeam.alive += 1

    def ask(self, command):
        verb = command["command"]
        if (self.name, verb) in FakeTeam.fails_at:
            raise TeamError(FakeTeam.fails_at[self.name, verb], "end of its log")
        FakeTeam.told.append((self.name, verb))
        engine = next(
            (v for k, v in session.ENGINE_NAMES.items() if k in self.name), "single process"
        )
        device = {"device": "cpu", "device_name": "CPU", "threads": 2}
        return [{
            "build": {**device, "loss": 8.8, "engine": engine},
            "steps": {"seconds": [1.0] * command.get("number", 0), "loss": 8.0},
            "peak": {"flops": 1e12, "shape": "2 × 2 × 2"},
            "memory": {"peak": 2**30, "free": (5 - FakeTeam.alive) * 2**30},
        }[verb]]  # fmt: skip

    def close(self):
        FakeTeam.alive -= 1


@pytest.fixture
def fake_teams(monkeypatch):
    FakeTeam.alive, FakeTeam.told, FakeTeam.fails_at = 0, [], {}
    monkeypatch.setattr(session, "Team", FakeTeam)
    monkeypatch.setattr(session, "obstacle", lambda *_: None)
    monkeypatch.setattr(Contender, "expected_bytes", lambda *_: 2**30)
    return FakeTeam


def measure(folder, *chosen, rounds=2, baseline=None):
    plan = Plan(list(chosen), baseline, rounds, 1, 0, "", True, 0)
    running = Session("test", SIZES["test"], plan, folder)
    found = running.measure()
    running.close()
    assert FakeTeam.alive == 0
    return found


def test_contenders_take_turns_with_the_yardstick_in_every_round(fake_teams, tmp_path):
    found = measure(tmp_path, LLAMA, OURS)
    turns = [name for name, verb in fake_teams.told if verb in ("steps", "peak")]
    one_round = ["matmul", "ours-eager", "transformers-eager"]
    assert turns == ["matmul", *one_round, *one_round, "matmul"]
    assert (found.baseline, len(found.measured_peaks)) == ("ours-eager", 4)
    assert [r.name for r in found.results] == ["transformers-eager", "ours-eager"]


def test_where_not_all_fit_the_baseline_meets_every_one(fake_teams, tmp_path):
    chosen = [LLAMA, LLAMA_COMPILED, OURS, OURS_COMPILED]
    # Five fit: the yardstick, three of these, and room that the Llamas take again in their turns.
    found = measure(tmp_path, *chosen, baseline="transformers-eager")
    rounds = {r.name: sorted(r.step_seconds) for r in found.results}
    assert rounds == {
        "transformers-eager": [1, 2, 3, 4],
        "transformers-compiled": [1, 2],
        "ours-eager": [1, 2],
        "ours-compiled": [3, 4],
    }


def test_what_is_too_large_is_listed_and_does_not_stop_the_others(
    fake_teams, tmp_path, monkeypatch
):
    def size(contender, *_):
        return (9 if contender.compiled else 1) * 2**30

    monkeypatch.setattr(Contender, "expected_bytes", size)
    found = measure(tmp_path, OURS_COMPILED, OURS, LLAMA)
    assert found.missing == {"ours-compiled": "takes about 9.0 GiB, and 4.0 GiB are free"}
    assert [r.name for r in found.results] == ["ours-eager", "transformers-eager"]


@pytest.mark.parametrize("command", ["build", "steps"])
def test_a_failure_is_listed_with_its_log_shown(fake_teams, tmp_path, command, capsys):
    fake_teams.fails_at = {("ours-eager", command): "OutOfMemoryError: no room"}
    found = measure(tmp_path, OURS, LLAMA, Contender("litgpt", False))
    assert found.missing == {"ours-eager": "OutOfMemoryError: no room"}
    assert [r.name for r in found.results] == ["transformers-eager", "litgpt-eager"]
    assert "    end of its log" in capsys.readouterr().err
    assert "ours-eager: OutOfMemoryError" in size_table(found)


def test_an_engine_that_was_switched_off_is_not_measured(fake_teams, tmp_path, monkeypatch):
    monkeypatch.setitem(session.ENGINE_NAMES, "zero2", "DeepSpeed ZeRO-2")
    monkeypatch.setattr(Contender, "name", "quiet")  # the fake then calls itself single
    found = measure(tmp_path, Contender("ours", False, "zero2"))
    assert "not as DeepSpeed ZeRO-2" in found.missing["quiet"]
    assert "Nothing could be measured" in size_table(found)


# Processes


def test_a_command_that_fails_answers_one_line_and_ends_the_worker(capfd):
    answers = io.StringIO()
    assert worker.serve(['{"command": "steps", "number": 1}', "never read"], answers) == 1
    assert json.loads(answers.getvalue())["error"].startswith("AttributeError: ")
    assert "Traceback" in capfd.readouterr().err


def test_a_worker_with_another_number_of_parameters_is_refused(monkeypatch):
    monkeypatch.setattr("benchmarks.peers.PeerStep", lambda *_: type("T", (), {"parameters": 5}))
    build = LLAMA.build_command(TEST, "")
    answers = io.StringIO()
    assert worker.serve([json.dumps(build)], answers) == 1
    assert "5 parameters instead of 508,224" in answers.getvalue()


def test_a_worker_that_dies_is_reported_with_the_end_of_its_log(tmp_path):
    # This interpreter with a PYTHONHOME that is none prints why and ends before any command.
    dying = Team([dict(os.environ, PYTHONHOME=str(tmp_path))], tmp_path)
    with pytest.raises(TeamError, match="exit code 1") as caught:
        dying.ask({"command": "memory"})
    assert "encodings" in caught.value.log


def throughput_command(*flags):
    return [sys.executable, "-m", "benchmarks.throughput", "--sizes", "test", *flags]


@pytest.mark.slow
def test_a_whole_run_prints_a_table_and_writes_the_file(tmp_path):
    flags = ["--contenders", "ours-eager,transformers-eager", "--allocator", "default"]
    flags += ["--rounds", "2", "--steps", "1", "--warmup_steps", "0"]
    ended = subprocess.run(
        throughput_command(*flags, "--json", str(tmp_path / "out.json")),
        cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^\| transformers-eager \| 1 \| [\d,]+ \(", ended.stdout, re.MULTILINE)
    written = json.loads((tmp_path / "out.json").read_text())
    (size,) = written["sizes"]
    assert written["device"] == "cpu"
    assert size["ours_against_fastest_peer"]["as_users_run_it"]["ratio"] > 0
    for found in size["results"]:
        assert len(found["step_seconds"]) == 2
        assert found["losses"][0] == pytest.approx(math.log(VOCAB_SIZE), abs=0.1)


@pytest.mark.slow
def test_an_interrupt_ends_every_worker(tmp_path):
    marker = f"TEST_MARKER={tmp_path}"
    environment = clean_environment() | dict([marker.split("=")])
    running = subprocess.Popen(
        throughput_command(), cwd=REPOSITORY, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not any("benchmarks.worker" in line for line in processes_with(marker)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert "stopped" in running.communicate(timeout=60)[1]
    assert processes_with(marker) == []


def processes_with(marker):
    """Command lines of the processes whose environment has it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


# Flags


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--sizes 26m,7b", "--sizes: '7b' is none of 26m, 104m, 360m, test"),
        ("--contenders nobody", "--contenders: 'nobody' is none of all"),
        ("--baseline litgpt-eager --contenders ours", "--baseline: 'litgpt-eager' is none of ours"),
        ("--rounds 0", "--rounds must be at least 1, not 0"),
        ("--warmup_steps -1", "--warmup_steps must be at least 0, not -1"),
        ("--dtype int8", "invalid choice: 'int8'"),
        ("--steps many", "invalid int value: 'many'"),
        ("--ours_flags=--use_flush_attn", "did you mean --use_flash_attn?"),
        ("--json /no/such/folder/out.json", "--json: there is no folder /no/such/folder"),
        ("--round 3", "did you mean --rounds?"),
    ],
)
def test_a_flag_that_cannot_work_is_one_line_and_exit_code_2(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        throughput.main(flags.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.throughput: error: ")
    assert said in error
    assert error.count("\n") == 1


def test_shapes_can_be_changed_by_flags():
    flags = "--sizes test,26m --batch_size 3 --seq_len 16 --accumulation_steps 2 --dtype float32"
    options = throughput.parse_options(flags.split())
    assert list(options.works) == ["test", "26m"]
    assert options.works["26m"].tokens == 3 * 16 * 2
    assert (options.works["test"].dtype, options.works["test"].dim) == ("float32", 64)


# Requirements


def test_benchmark_pins_are_the_benchmark_dependencies():
    pins = lines_of("requirements-benchmarks.txt")
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==\d+(\.\d+)+", pin)] == []
    assert {pin.partition("==")[0] for pin in pins} == names_in("benchmarks")
