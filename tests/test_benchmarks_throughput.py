import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY, clean_environment, processes_with
from test_benchmarks_contenders import LLAMA
from test_pins import lines_of, names_in

from benchmarks import throughput, worker
from benchmarks.team import Team, TeamError
from benchmarks.work import SIZES, VOCAB_SIZE


def test_a_command_that_fails_answers_one_line_and_ends_the_worker(capfd):
    answers = io.StringIO()
    assert worker.serve(['{"command": "steps", "number": 1}', "never read"], answers) == 1
    assert json.loads(answers.getvalue())["error"].startswith("AttributeError: ")
    assert "Traceback" in capfd.readouterr().err


def test_a_worker_with_another_number_of_parameters_is_refused(monkeypatch):
    monkeypatch.setattr("benchmarks.peers.PeerStep", lambda *_: type("T", (), {"parameters": 5}))
    build = LLAMA.build_command(SIZES["test"], "")
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
def test_a_run_that_is_terminated_prints_its_table_and_writes_its_rounds(tmp_path):
    written = tmp_path / "out.json"
    flags = ["--contenders", "ours-eager", "--rounds", "1000000", "--steps", "1", "--json", written]
    running = subprocess.Popen(
        throughput_command(*flags), cwd=REPOSITORY, env=clean_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in running.stderr:
        if "round 2/" in line:
            break
    running.terminate()
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert "| ours-eager | 1 |" in out
    assert "before the end" in out
    (size,) = json.loads(written.read_text())["sizes"]
    assert size["stopped_after"] >= 2
    assert len(size["results"][0]["step_seconds"]) >= 2


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
        ("--ours_flags='x", '--ours_flags: "\'x": No closing quotation'),
        ("--ours_flags=--help", "--ours_flags: python train_pretrain_accelerate.py --help lists"),
        ("--ours_flags=--batch_size=1", "--ours_flags: --batch_size is the same for all"),
        ("--sizes ,", "--sizes names none"),
        ("--contenders ,", "--contenders names none"),
        ("--json /no/such/folder/x", "--json: no file can be written at '/no/such/folder/x'"),
        ("--json /tmp", "--json: no file can be written at '/tmp'"),
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


def test_benchmark_pins_are_the_benchmark_dependencies():
    pins = lines_of("requirements-benchmarks.txt")
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==\d+(\.\d+)+", pin)] == []
    assert {pin.partition("==")[0] for pin in pins} == names_in("benchmarks")
