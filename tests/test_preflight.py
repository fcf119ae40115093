"""Before run_accelerate.sh starts processes, it checks the launch and chooses the flags."""

import json
import os
import shutil

import pytest
import torch
import yaml
from conftest import REPOSITORY, error_of, pack
from small_model import save_model
from test_resume_choice import make_run

from lm.common.errors import UsageError
from lm.launch import preflight, time_budget
from lm.launch.candidates import Candidates
from lm.launch.preflight import main, read_launch
from lm.launch.shell_variables import ShellVariables
from lm.storage.folder import RunFolder
from lm.training import measurement
from lm.training.arguments import build_parser
from model import LMConfig, Transformer

TINY = ["--dim", "32", "--n_layers", "1", "--n_heads", "4", "--max_seq_len", "32"]
ZERO_2 = "accelerate_config.yaml"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    """Runs a test in the repository, like run_accelerate.sh; then restores the environment."""
    monkeypatch.chdir(REPOSITORY)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    monkeypatch.setattr(os, "environ", clean)


@pytest.fixture
def flags(packed) -> list[str]:
    return [*TINY, "--data", str(packed)]


@pytest.fixture
def config_file(tmp_path):
    """Writes a copy of accelerate_config.yaml with changes; returns the path of the copy."""

    def write(**changes) -> str:
        config = yaml.safe_load((REPOSITORY / ZERO_2).read_text(encoding="utf-8"))
        path = tmp_path / "launch.yaml"
        path.write_text(yaml.safe_dump(config | changes), encoding="utf-8")
        return str(path)

    return write


DDP = {"distributed_type": "MULTI_GPU", "deepspeed_config": {}, "mixed_precision": "bf16"}


def prepare(config_file: str, flags: list[str], processes: int = 1) -> Candidates:
    """Find the data and the models of a launch."""
    read_launch(config_file)
    request = ShellVariables({"NUM_PROCESSES": str(processes)})
    return Candidates(request, vars(build_parser().parse_args(flags)))


def test_the_flags_must_fit_the_data(flags):
    said = error_of(prepare, ZERO_2, [*flags, "--max_seq_len", "100000"])
    assert "use other text or a shorter --max_seq_len" in said


def test_tasks_are_machines_only_if_their_number_is_set(monkeypatch):
    task = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "NUM_MACHINES": "", "STAGE": "dpo"}
    monkeypatch.setattr(os, "environ", os.environ | task)
    assert "srun has started this command several times" in error_of(main, [])
    os.environ["NUM_MACHINES"] = "2"
    assert "STAGE must be" in error_of(main, [])
    assert "SLURM_NTASKS" not in os.environ


@pytest.mark.parametrize(
    ("changes", "keyword"),
    [
        ({"num_procesess": 2}, "num_procesess"),
        ({"mixed_precision": "bf16"}, "mixed_precision"),
        ({"deepspeed_config": {"deepspeed_config_file": "no/where.json"}}, "no/where.json"),
        ({"num_machines": 2}, "2 machines: set NUM_MACHINES"),
        ({"dynamo_config": {"dynamo_backend": "EAGER"}}, "use --compile on"),
        (DDP | {"distributed_type": "FSDP"}, "the launcher's engine FSDP is not supported"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(flags, config_file, changes, keyword):
    assert keyword in error_of(prepare, config_file(**changes), flags)


@pytest.mark.parametrize("text", ["a: b: c", "[1, 2]", "", "distributed_type: NONSENSE\n"])
def test_the_error_names_a_file_that_is_no_launcher_configuration(flags, tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text, encoding="utf-8")
    assert "broken.yaml" in error_of(prepare, str(path), flags)


@pytest.mark.parametrize("by_flag", [False, True])
def test_the_number_of_processes_is_part_of_the_global_batch(flags, config_file, tmp_path, by_flag):
    """The launcher's file or the flag --deepspeed names the DeepSpeed file."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 16}))
    path = config_file(deepspeed_config={"deepspeed_config_file": str(file)})
    if by_flag:
        path = config_file(**DDP | {"mixed_precision": None})
        flags = [*flags, "--deepspeed", str(file)]
    prepare(path, flags, 2)
    assert "gives 32" in error_of(prepare, path, flags, 4)


@pytest.mark.parametrize(
    "typed", ["--dimm 4", "--batch_size 0", "--dtype float17", "--resume no/run"]
)
def test_a_mistake_is_refused_before_text_is_prepared(monkeypatch, typed):
    monkeypatch.setattr(ShellVariables, "data_flags", lambda *_: pytest.fail("prepares text"))
    with pytest.raises(UsageError, match=typed.split()[0]):
        main(typed.split())
    monkeypatch.setitem(os.environ, "CONFIG", "none.yaml")
    assert "none.yaml" in error_of(main, [])


def test_a_resumed_run_keeps_precision_and_data_and_other_data_is_refused(
    corpus, tmp_path, monkeypatch
):
    text, out = tmp_path / "mine.jsonl", tmp_path / "out" / "data" / "mine"
    shutil.copy(corpus, text)
    pack(text, out)
    saved = RunFolder(make_run(tmp_path / "runs" / "saved", 10))
    arguments = {"data": str(out), "dtype": "bfloat16"}
    saved.settings.write_text(json.dumps({"arguments": arguments}), encoding="utf-8")
    monkeypatch.setattr(preflight, "cpu_emulates_bf16", lambda: True)
    monkeypatch.setattr("lm.launch.shell_variables.default_out", lambda *_: out)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("prepares text"))
    words = ["--resume", str(saved.path)]
    launched = main(words)
    assert launched[-2:] == words
    assert "--dtype=float32" not in launched
    monkeypatch.setitem(os.environ, "DATA", str(text))
    os.utime(text, (0, 0))  # the same text
    assert main(words)[-2:] == words
    with open(text, "a", encoding="utf-8") as file:
        file.write('{"text": "one more"}\n')
    said = error_of(main, words)
    assert said.startswith(f"DATA: not what {saved.path} was trained on; its data stays in {out}.")
    assert f"pass --data {out} instead" in said
    assert f"--init_from {saved.path}" in said


def test_a_yaml_decides_the_precision_and_a_stage_without_a_file(flags, config_file, monkeypatch):
    section = {"zero_stage": 1, "offload_optimizer_device": "none", "zero3_init_flag": False}
    path = config_file(deepspeed_config=section, mixed_precision="no")
    monkeypatch.setitem(os.environ, "CONFIG", path)
    words = main([*flags, "--max_steps", "2"])
    assert "--dtype=float32" in words
    assert prepare(path, flags, 2).strategy.stage == 1


@pytest.mark.parametrize(
    ("environ", "size", "said"),
    [
        ({"DATA": "{file}"}, 10_000_000_000, "preparing 10.0 GB may take about 21 min"),
        ({"DATA": "{file}"}, 10_000_000, ""),
        ({"CHAT": "{file}", "STAGE": "sft"}, 1_000_000_000, "preparing 1.0 GB may take about 21"),
        ({}, 1, ""),
    ],
)
def test_a_long_preparation_is_announced(monkeypatch, tmp_path, capsys, environ, size, said):
    monkeypatch.setattr(preflight, "available_cores", lambda: 2)
    file = tmp_path / "a.jsonl"
    with open(file, "wb") as sparse:
        sparse.truncate(size)
    environ = {name: value.format(file=file) for name, value in environ.items()}
    preflight.announce_preparation(ShellVariables({"MINUTES": "10"} | environ))
    out = capsys.readouterr().out
    assert said in out
    assert bool(said) == bool(out)


@pytest.fixture
def weights(packed, tmp_path) -> str:
    """A folder with the weights of a tiny model."""
    config = LMConfig(dim=32, n_layers=1, n_heads=4, max_seq_len=32, vocab_size=400)
    return str(save_model(tmp_path / "weights", Transformer(config), packed))


@pytest.mark.parametrize(
    ("environ", "words", "says"),
    [
        ({}, "--data {packed} --dim 48 --deepspeed ds_config.json", "2 layers of dim 48"),
        ({}, "--data {packed} --init_from {weights}", "1 layer of dim 32"),
        ({"STAGE": "sft", "CHAT": "{chat}"}, "--init_from {weights}", "1 layer of dim 32"),
        ({"STAGE": "distill", "TEACHER": "{weights}"}, "--data {packed}", "2 layers of dim 64"),
    ],
)
def test_every_stage_measures_real_steps(
    packed, weights, tmp_path, monkeypatch, capsys, environ, words, says
):
    chat = tmp_path / "chat.jsonl"
    rows = [json.dumps({"prompt": f"{i}?", "response": "1 + 1"}) for i in range(40)]
    chat.write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.setattr(measurement, "WINDOW", 0.0)
    monkeypatch.setattr(time_budget, "COMPILING_SHARE", 0.0)
    names = {"packed": packed, "weights": weights, "chat": chat}
    here = {k: v.format(**names) for k, v in environ.items()} | {"MINUTES": "0.1"}
    engine = {} if "--deepspeed" in words else {"ENGINE": "ddp"}
    before = set(REPOSITORY.glob("out/data/chat-*-chat"))
    monkeypatch.setattr(os, "environ", os.environ | here | engine)
    try:
        arguments = main(words.format(**names).split())
    finally:
        for folder in {*REPOSITORY.glob("out/data/chat-*-chat")} - before:
            shutil.rmtree(folder)
    said = capsys.readouterr().out
    assert says in said
    assert "tokens/s expected" in said, "the speed was assumed"
    assert "these are few steps" in said or "more text would help" in said
    assert any(word.startswith("--max_steps=") for word in arguments)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("emulates", [True, False])
def test_the_launcher_gets_the_engine_the_processes_and_all_flags(packed, monkeypatch, emulates):
    monkeypatch.setattr(preflight, "cpu_emulates_bf16", lambda: emulates)
    words = [*TINY, "--data", str(packed), "--max_steps", "2", "--no-use_flash_attn"]
    monkeypatch.setattr(os, "environ", os.environ | {"NUM_PROCESSES": "2", "ENGINE": "zero1"})
    arguments = main(words)
    expected = "--config_file configs/zero1.yaml --num_processes 2 --main_process_port 0"
    assert arguments[:6] == expected.split()
    program = arguments.index("train_pretrain_accelerate.py")
    parsed = vars(build_parser().parse_args(arguments[program + 1 :]))
    assert (parsed["dim"], parsed["max_steps"], parsed["optimizer"]) == (32, 2, "muon")
    assert parsed["use_flash_attn"] is False
    assert parsed.get("dtype") == ("float32" if emulates else None)
    del os.environ["WORLD_SIZE"]  # the command sets it
    typed = main([*words, "--dtype", "bfloat16"])
    assert vars(build_parser().parse_args(typed[program + 1 :]))["dtype"] == "bfloat16"
