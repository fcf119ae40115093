"""The environment variables of run_accelerate.sh."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import error_of
from test_preflight import in_the_repository  # noqa: F401  a fixture of every test

from lm.common.errors import UsageError
from lm.launch import shell_variables
from lm.launch.shell_variables import ShellVariables
from lm.training.arguments import DistillationArguments, SFTArguments, TrainingArguments
from scripts.prepare_data import parse_arguments

TWO_MACHINES = {"NUM_MACHINES": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"ENGINE": "zero3", "CONFIG": "my.yaml"}, "set only one"),
        ({"ENGINE": "zero5"}, "ENGINE=zero5: take one of ddp, fp16, multi_node, zero1, zero2, "),
        ({"CONFIG": "my.yaml"}, "CONFIG=my.yaml: no such file"),
        ({"STAGE": "dpo"}, "STAGE must be pretrain, sft or distill, not dpo"),
        ({"STAGE": "distill", "DATA": "x"}, "STAGE=distill does not use DATA"),
        ({"STAGE": "sft", "PREPARE_FLAGS": "--reuse"}, "does not use PREPARE_FLAGS"),
        ({"MASTER_PORT": "many"}, "MASTER_PORT must be an integer, 0 or larger, not 'many'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT 70000 below 65536"),
        ({"NUM_MACHINES": "1", "MACHINE_RANK": "1"}, "MACHINE_RANK 1 must be below NUM_MACHINES 1"),
        ({"MASTER_ADDR": "node1"}, "set NUM_MACHINES too"),
        ({"NUM_PROCESSES": "0"}, "positive multiple of NUM_MACHINES"),
        (TWO_MACHINES | {"NUM_PROCESSES": "3"}, "positive multiple of NUM_MACHINES"),
        ({"NUM_MACHINES": "2", "MASTER_ADDR": "no name"}, "cannot resolve 'no name'"),
        *(
            ({"MINUTES": text}, "MINUTES must be a positive number")
            for text in ("0", "nan", "9" * 310)
        ),
    ],
)
def test_variables_that_cannot_work_are_refused(environ, says):
    assert says in error_of(ShellVariables, environ)


def test_each_stage_selects_its_arguments_and_minutes_can_be_a_fraction(monkeypatch):
    found = [ShellVariables({"STAGE": stage}).arguments for stage in ("", "sft", "distill")]
    assert found == [TrainingArguments, SFTArguments, DistillationArguments]
    assert ShellVariables({"MINUTES": "0.5"}).minutes == 0.5
    assert ShellVariables({}).minutes == 4
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert ShellVariables({}).minutes == 10


@pytest.mark.parametrize(
    ("environ", "gpus", "processes"),
    [({}, 0, 1), ({}, 4, 4), (TWO_MACHINES, 8, 16), ({"NUM_PROCESSES": "3"}, 0, 3)],
)
def test_each_gpu_gets_a_process_unless_a_number_is_set(monkeypatch, environ, gpus, processes):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    found = ShellVariables(environ)
    assert found.processes == processes
    assert found.port == (29500 if environ == TWO_MACHINES else 0)


def test_each_stage_gets_the_flags_that_name_its_data_or_teacher():
    typed = {"data": "out/data/mine"}
    assert ShellVariables({}).data_flags(typed, {}) == {}
    with pytest.raises(UsageError, match="leave out --data, or DATA"):
        ShellVariables({"DATA": "my.txt"}).data_flags(typed, {})
    chat = ShellVariables({"STAGE": "sft", "CHAT": "my.jsonl"}).data_flags({}, {})
    assert chat == {"conversations": "my.jsonl"}
    assert ShellVariables({"STAGE": "distill"}).data_flags({}, {}) == {}
    named = ShellVariables({"STAGE": "distill", "TEACHER": "big"})
    assert named.data_flags({}, {}) == {"teacher": "big"}
    for stage in ("pretrain", "sft"):  # a resumed run has its data
        assert ShellVariables({"STAGE": stage}).data_flags({}, typed) == {}


@pytest.mark.parametrize(
    ("flags", "reuse"),
    [
        ("", True),
        ("--skip_bad_lines --val_fraction 0.5", True),
        ("--tokenizer a.model", False),  # another tokenizer at this path counts
    ],
)
def test_text_is_prepared_with_typed_flags(monkeypatch, flags, reuse):
    run = Mock(return_value=SimpleNamespace(returncode=0))
    monkeypatch.setattr(shell_variables.subprocess, "run", run)
    found = ShellVariables({"DATA": "my.txt", "PREPARE_FLAGS": flags}).data_flags({}, {})
    args = parse_arguments(run.call_args.args[0][3:])
    assert (args.data, found) == ("my.txt", {"data": str(args.out)})
    assert (args.reuse, args.overwrite) == (reuse, True)
    assert args.skip_bad_lines is ("--skip_bad_lines" in flags)
