"""The checks before any process is started, which prepare a run without starting it."""

import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import REPOSITORY, clean_environment
from test_resume_choice import make_run

from common.errors import UsageError
from data.dataset import PackedDataset
from data.errors import DataError
from data.tokenizer import TOKENIZER_FILE
from formats.portable import WEIGHTS_FILE, save_portable
from model import ConfigError, LMConfig, Transformer
from storage.folder import RunFolder
from training import preflight
from training.arguments import parse_arguments
from training.engine.deepspeed_config import read_config
from training.engine.estimate import GIB, MARGIN, OVERHEAD, Workload, engines, estimate, kind_of
from training.preflight import ADAMW, MUON, check_launch, cpu_flags
from training.prepare import shapes_of
from training.resume import run_identity

TINY = ["--dim", "32", "--n_layers", "1", "--n_heads", "4", "--max_seq_len", "32"]
CONFIG = LMConfig(dim=32, n_layers=1, n_heads=4, max_seq_len=32, vocab_size=400)
ZERO_2 = "accelerate_config.yaml"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    """Tests run in the repository, like run_accelerate.sh; the environment is restored."""
    monkeypatch.chdir(REPOSITORY)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    monkeypatch.setattr(os, "environ", clean)


@pytest.fixture
def flags(packed) -> list[str]:
    return [*TINY, "--data", str(packed)]


@pytest.fixture
def config_file(tmp_path):
    """Writes a launcher's configuration like the repository's, with changes."""

    def write(ds_config: str | dict | None = None, **changes) -> str:
        config = yaml.safe_load((REPOSITORY / ZERO_2).read_text(encoding="utf-8"))
        if ds_config is not None:
            path = tmp_path / "ds.json"
            path.write_text(ds_config if isinstance(ds_config, str) else json.dumps(ds_config))
            config["deepspeed_config"] = {"deepspeed_config_file": str(path)}
        path = tmp_path / "launch.yaml"
        path.write_text(yaml.safe_dump(config | changes), encoding="utf-8")
        return str(path)

    return write


DDP = {"distributed_type": "MULTI_GPU", "deepspeed_config": {}, "mixed_precision": "bf16"}


def refused(config_file: str, flags: list[str], processes: str = "1", **how) -> str:
    with pytest.raises((UsageError, ConfigError, DataError)) as raised:
        check_launch(config_file, processes, flags, **how)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_launch_that_works_passes(flags, config_file, monkeypatch):
    assert check_launch(ZERO_2, "4", flags) == {}
    check_launch(config_file(**DDP), "1", flags)
    check_launch(ZERO_2, "4", [*flags, "--deepspeed", "ds_config.json"])
    monkeypatch.setitem(os.environ, "NUM_MACHINES", "2")
    check_launch("configs/multi_node.yaml", "2", flags)
    assert "number of processes" in refused("configs/multi_node.yaml", flags, "two")


@pytest.mark.parametrize(
    ("more", "keyword"),
    [
        (["--nonsense"], "--nonsense"),
        (["--dim", "7"], "dim 7"),
        (["--max_seq_len", "100000"], "use a shorter --max_seq_len"),
        (["--data", "nothing/here"], "nothing/here"),
        (["--init_from", "no/weights"], "no/weights: no such folder"),
        (["--resume", "no/run"], "--resume no/run: neither a run with checkpoints nor a"),
        (["--dtype", "float16"], "--dtype float16 needs a GPU"),
        (["--deepspeed", "other.json"], "the launcher's DeepSpeed file is ds_config.json"),
        (["--log_with", "wandb"], "pip install wandb"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, more, keyword, monkeypatch):
    there = importlib.util.find_spec
    absent = lambda name: None if name == "wandb" else there(name)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", absent)
    assert keyword in refused(ZERO_2, [*flags, *more])


@pytest.mark.parametrize(
    ("changes", "keyword"),
    [
        ({"num_procesess": 2}, "num_procesess"),
        ({"mixed_precision": "bf16"}, "mixed_precision"),
        ({"ds_config": "{'a': 1}"}, "no readable JSON"),
        ({"deepspeed_config": {"deepspeed_config_file": "no/where.json"}}, "no/where.json"),
        (
            {"ds_config": {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 8}},
            "--accumulation_steps gives 1",
        ),
        ({"num_machines": 2}, "2 machines: set NUM_MACHINES"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(flags, config_file, changes, keyword):
    assert keyword in refused(config_file(**changes), flags)


@pytest.mark.parametrize("text", [None, "a: b: c", "[1, 2]", "", "distributed_type: NONSENSE\n"])
def test_a_file_that_is_no_launcher_configuration_is_refused_by_name(flags, tmp_path, text):
    path = tmp_path / "broken.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert "broken.yaml" in refused(str(path), flags)


@pytest.mark.parametrize("on_the_script", [False, True])
def test_the_number_of_processes_is_part_of_the_global_batch(
    flags, config_file, tmp_path, on_the_script
):
    """The launcher's file or the flag --deepspeed names the DeepSpeed file."""
    path = config_file({"zero_optimization": {"stage": 2}, "train_batch_size": 16})
    if on_the_script:
        path = config_file(**DDP | {"mixed_precision": None})
        flags = [*flags, "--deepspeed", str(tmp_path / "ds.json")]
    check_launch(path, "2", flags)
    assert "gives 32" in refused(path, flags, "4")


def test_the_weights_of_init_from_are_read(flags, packed, tmp_path):
    weights = tmp_path / "weights"
    save_portable(weights, CONFIG, dict(Transformer(CONFIG).named_parameters()))
    shutil.copy(packed / TOKENIZER_FILE, weights)
    flags = [*flags, "--init_from", str(weights)]
    check_launch(ZERO_2, "2", flags)
    (weights / WEIGHTS_FILE).write_bytes((weights / WEIGHTS_FILE).read_bytes()[:-1])
    assert refused(ZERO_2, flags).startswith(f"{weights}: no readable weights")


@pytest.fixture
def run_of(flags, packed, tmp_path):
    """Makes a run that one process saved with these flags."""

    def run_of(*more: str):
        args, _ = parse_arguments([*flags, *more])
        train_set = PackedDataset(packed, "train", CONFIG.max_seq_len)
        state = {"identity": run_identity(train_set, args, 1, None), "model": CONFIG.to_dict()}
        path = make_run(tmp_path / "runs" / "saved", 10, **state)
        settings = json.dumps({"arguments": vars(args)}, default=str)
        RunFolder(path).settings.write_text(settings, encoding="utf-8")
        return path

    return run_of


def test_a_run_to_resume_is_checked_and_not_touched(flags, run_of, capsys):
    run = run_of()
    before = sorted(run.parent.rglob("*"))
    here = [*flags, "--out_dir", str(run.parent), "--run_name", run.name]
    check_launch(ZERO_2, "1", [*here, "--resume", "auto"])
    said = refused(ZERO_2, here)
    assert f"{run} holds a run: pass --resume auto, or another run_name" in said
    resumed = [*flags, "--resume", str(run)]
    check_launch(ZERO_2, "2", [*resumed, "--batch_size", "2"])
    assert sorted(run.parent.rglob("*")) == before
    assert capsys.readouterr().out == ""
    (RunFolder(run).checkpoint(10) / "state.json").write_text("{}", encoding="utf-8")
    assert "is damaged" in refused(ZERO_2, resumed)


def room_for(batch_size: int, processes: int, compiled: bool) -> int:
    """Bytes that a GPU must have free for a micro-batch of the tiny model under ZeRO-2."""
    args, _ = parse_arguments(["--batch_size", str(batch_size)])
    work = Workload(
        args=args,
        shapes=shapes_of(CONFIG, args),
        processes=processes,
        device=torch.device("cuda"),
        compiled=compiled,
    )
    needed = estimate(kind_of(read_config("ds_config.json"), CONFIG.dim), work)
    return int(needed.held + needed.teacher + needed.working * MARGIN + OVERHEAD) + 1


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that there are GPUs with these numbers of bytes free."""

    def have(*free: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(
            preflight, "available_memory", lambda device, processes: free[device.index]
        )

    return have


@pytest.mark.parametrize(
    ("batch_wanted", "less", "batch_size"),
    [(768, 0, 768), (768, 2, 384), (32, 0, 32), (32, 2, 24), (1, 2, 1)],
)
@pytest.mark.parametrize("compiled", [True, False])  # the run is too short for "auto"
def test_the_largest_micro_batch_that_fits_is_chosen_for_the_same_global_batch(
    flags, gpus, capsys, batch_wanted, less, batch_size, compiled
):
    flags = [*flags, "--compile", "on" if compiled else "auto"]
    least = room_for(batch_wanted, 3, compiled) - less
    gpus(least + GIB, least, least + GIB, 0)  # the last one is not used
    added = check_launch(ZERO_2, "3", flags, "768")
    assert added == {"batch_size": batch_size, "accumulation_steps": 768 // batch_size}
    assert capsys.readouterr().out.count("\n") == 1


def test_a_launch_is_checked_with_the_micro_batch_that_fits(flags, gpus, config_file):
    gpus(10 * GIB)
    file = config_file({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8})
    assert "--batch_size gives 768" in refused(file, flags, share="768")


def test_a_resumed_run_keeps_its_micro_batch_whatever_memory_is_free(flags, gpus, run_of, capsys):
    gpus(10 * GIB)
    words = [*flags, "--resume", str(run_of("--batch_size", "48", "--accumulation_steps", "16"))]
    assert check_launch(ZERO_2, "1", words, "768") == {"batch_size": 48, "accumulation_steps": 16}
    assert "micro-batch: 48 of 768 sequences, as saved" in capsys.readouterr().out
    said = refused(ZERO_2, words, share="50")
    assert "global_batch: 768 in the checkpoint, 50 now" in said


def test_a_launch_that_cannot_work_exits_with_code_2_and_an_empty_stdout(flags, tmp_path):
    """The command is that of run_accelerate.sh."""
    command = [sys.executable, "-m", "training.preflight", "train_pretrain_accelerate.py", ZERO_2]
    ended = subprocess.run(
        [*command, "1", "0", *flags, "--resume", str(tmp_path)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr
    said = ended.stderr.splitlines()[-1]
    assert said.startswith(f"run_accelerate.sh: error: --resume {tmp_path}: neither a run")


@pytest.mark.parametrize(
    ("tokens", "segmentations", "typed", "steps"),
    [
        (614_400, 1, {}, 600),
        (382_016, 1, {}, 373),
        (9_000, 1, {}, 100),
        (2_216_140, 7, {}, 541),
        (0, 1, {"teacher": "auto"}, 180),
        (9_000, 1, {"max_steps": 10**6}, None),
        (614_400, 1, {"epochs": 2}, None),
    ],
)
def test_the_default_steps_on_a_cpu_read_a_small_text_four_times(
    monkeypatch, tokens, segmentations, typed, steps
):
    described = {"splits": {"train": {"tokens": tokens}}}
    described["prepared_from"] = {"segmentations": segmentations}
    monkeypatch.setattr(preflight, "read_description", lambda data: described)
    typed = typed | {"learning_rate": 1e-3, "data": "anywhere"}
    expected = {"optimizer": "adamw"} | ({"max_steps": steps} if steps else {})
    assert cpu_flags(typed, takes_muon=False) == expected  # typed flags stay


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "zero2_offload"])
def test_on_a_cpu_the_engines_that_support_muon_get_muon(name, flags, capsys):
    kind = next(kind for kind in engines(dim=192) if kind.config == name)
    added = check_launch(f"configs/{name}.yaml", "1", flags, "cpu")
    assert added == (MUON if kind.takes_muon else ADAMW) | {"max_steps": added["max_steps"]}
    assert f"steps: {added['max_steps']}, which suits a CPU" in capsys.readouterr().out
