import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
from itertools import count
from types import SimpleNamespace

import pytest
from conftest import REPOSITORY, clean_environment, processes_with
from test_benchmarks_contenders import LLAMA
from test_pins import lines_of, names_in

from benchmarks import throughput, worker
from benchmarks.team import Team, TeamError
from benchmarks.work import SIZES, VOCAB_SIZE

UNTRAINED = math.log(VOCAB_SIZE)


class FakeConnection:
    """The parent's questions, one after the other; and then it closes its end."""

    def __init__(self, *questions):
        self.questions, self.answers = list(questions), []

    def recv(self):
        if not self.questions:
            raise EOFError
        return self.questions.pop(0)

    def send(self, answer):
        self.answers.append(answer)


def fake_task(monkeypatch, loss):
    """A contender whose n-th step takes n seconds."""
    clock, steps = [0], count(1)

    def step():
        clock[0] += next(steps)

    cpu = SimpleNamespace(type="cpu")
    task = SimpleNamespace(engine="single process", device=cpu, step=step, loss=lambda: loss)
    monkeypatch.setattr(worker, "build", lambda contender, work: task)
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: clock[0]))


def test_a_worker_takes_a_first_step_and_then_as_many_as_it_is_told(monkeypatch):
    fake_task(monkeypatch, loss=UNTRAINED)
    connection = FakeConnection((LLAMA, SIZES["test"]), 2, 3)
    assert worker.serve(connection) == 0
    assert [answer["seconds"] for answer in connection.answers] == [[1], [2, 3], [4, 5, 6]]
    assert connection.answers[0]["engine"] == "single process"


def test_a_contender_that_does_not_begin_untrained_is_refused(monkeypatch, capfd):
    fake_task(monkeypatch, loss=5.0)
    connection = FakeConnection((LLAMA, SIZES["test"]), "never read")
    assert worker.serve(connection) == 1
    (answer,) = connection.answers
    assert answer["error"] == "ValueError: the loss starts at 5.000, not near ln(6400)"
    assert "Traceback" in capfd.readouterr().err


def test_a_worker_that_dies_is_reported_with_the_end_of_its_log(tmp_path):
    # This interpreter with a PYTHONHOME that is none prints why and ends before any command.
    dying = Team([dict(os.environ, PYTHONHOME=str(tmp_path))], tmp_path)
    with pytest.raises(TeamError, match="exit code 1") as caught:
        dying.ask((LLAMA, SIZES["test"]))
    assert "encodings" in caught.value.log


def test_an_error_in_a_worker_ends_it_and_comes_with_its_log(tmp_path):
    team = Team([clean_environment()], tmp_path)
    with pytest.raises(TeamError, match=r"AttributeError: .*has no attribute 'is_ours'") as caught:
        team.ask(("no contender", SIZES["test"]))
    assert "Traceback" in caught.value.log
    assert team._ranks == []


def throughput_command(*flags):
    return [sys.executable, "-m", "benchmarks.throughput", "--sizes", "test", *flags]


def test_only_the_first_rank_writes_a_trace_and_all_take_the_step(monkeypatch, tmp_path):
    fake_task(monkeypatch, loss=UNTRAINED)
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        connection = FakeConnection((LLAMA, SIZES["test"]), tmp_path / f"{rank}.json", 1)
        assert worker.serve(connection) == 0
        assert connection.answers[1] == {}
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]


@pytest.mark.slow
@pytest.mark.variant  # of time_to_loss, which is interrupted
def test_a_whole_run_prints_a_table_and_writes_the_file(tmp_path):
    flags = ["--contenders", "ours-eager,transformers-eager"]
    flags += ["--rounds", "2", "--steps", "1", "--warmup_steps", "0"]
    ended = subprocess.run(
        throughput_command(*flags, "--json", str(tmp_path / "out.json"), "--trace", str(tmp_path)),
        cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^\| transformers-eager \| 1 \| [\d,]+ \(", ended.stdout, re.MULTILINE)
    assert "ours / fastest peer: n/a" not in ended.stdout
    (size,) = json.loads((tmp_path / "out.json").read_text())
    for found, rounds in zip(size["results"], (3, 2), strict=True):
        assert len(found["step_seconds"]) == rounds
        assert found["losses"][0] == pytest.approx(UNTRAINED, abs=0.1)
    for name in ("ours-eager", "transformers-eager"):
        with gzip.open(tmp_path / f"test-{name}.json.gz", "rt") as file:
            events = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"aten::mm", "aten::embedding"} <= events


@pytest.mark.variant  # of time_to_loss, which is interrupted
def test_a_run_that_is_terminated_prints_its_table_and_writes_its_rounds(tmp_path):
    written = tmp_path / "out.json"
    flags = ["--contenders", "ours-eager", "--rounds", "1000000", "--steps", "1", "--json", written]
    running = subprocess.Popen(
        throughput_command(*flags), cwd=REPOSITORY, env=clean_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in running.stderr:
        if "round 2," in line:
            break
    running.terminate()
    out, _ = running.communicate()
    assert running.returncode == 128 + signal.SIGTERM
    assert "| ours-eager | 1 |" in out
    assert "before the end" in out
    (size,) = json.loads(written.read_text())
    assert not size["finished"]
    assert len(size["results"][0]["step_seconds"]) >= 2


@pytest.mark.variant  # of time_to_loss, which is interrupted
def test_an_interrupt_ends_every_worker(tmp_path):
    marker = f"TEST_MARKER={tmp_path}"
    running = subprocess.Popen(
        throughput_command("--contenders", "ours-eager", "--rounds", "1000000", "--steps", "1"),
        cwd=REPOSITORY, env=clean_environment() | dict([marker.split("=")]),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in running.stderr:
        if "first step after" in line:
            break
    assert any("benchmarks.worker" in line for line in processes_with(marker))
    running.send_signal(signal.SIGINT)
    assert running.communicate()[1].splitlines()[-1] == "throughput: stopped"
    assert processes_with(marker) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--sizes 26m,7b", "--sizes: '7b' is none of 26m, 104m, 360m, test"),
        ("--sizes ,", "--sizes: '' is none of"),
        ("--contenders nobody", "--contenders: 'nobody' is none of all"),
        ("--contenders ,", "--contenders: '' is none of all"),
        ("--rounds 0", "--rounds: whole numbers from 1 on, not '0'"),
        ("--warmup_steps -1", "--warmup_steps: whole numbers from 0 on, not '-1'"),
        ("--steps many", "--steps: whole numbers from 1 on, not 'many'"),
        ("--json /no/such/folder/x", "--json: no file can be written at /no/such/folder/x"),
        ("--json /tmp", "--json: no file can be written at /tmp"),
        ("--trace /no/such/folder", "--trace: there is no folder /no/such/folder"),
        ("--round 3", "did you mean --rounds?"),
    ],
)
def test_a_flag_that_cannot_work_is_one_line_and_exit_code_2(flags, said, capsys, monkeypatch):
    monkeypatch.setattr(throughput, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        throughput.main(flags.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.throughput: error: ")
    assert said in error
    assert error.count("\n") == 1


def test_shapes_can_be_changed_by_flags():
    flags = "--sizes test,26m --batch_size 3 --seq_len 16 --accumulation_steps 2"
    options = throughput.parse_options(flags.split())
    assert list(options.works) == ["test", "26m"]
    assert options.works["26m"].tokens == 3 * 16 * 2
    assert options.works["test"].dim == 64


def test_benchmark_pins_are_the_benchmark_dependencies():
    pins = lines_of("requirements-benchmarks.txt")
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==\d+(\.\d+)+", pin)] == []
    assert {pin.partition("==")[0] for pin in pins} == names_in("benchmarks")
