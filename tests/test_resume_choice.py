"""A command starts or resumes the right run, refuses a wrong one, and writes settings.json."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import error_of

from lm.common.errors import UsageError
from lm.data.shards import TEXT
from lm.engine.engine import Engine
from lm.storage.checkpoint import OPTIMIZER, RANDOM, WEIGHTS, write_checkpoint
from lm.storage.folder import RunFolder, lock, read_settings, release_locks
from lm.training.arguments import (
    DistillationArguments,
    SFTArguments,
    TrainingArguments,
    build_parser,
)
from lm.training.inputs import choose_sources, shapes_of
from lm.training.resume import (
    changes_since_stop,
    decided_arguments,
    require_same_run,
    run_identity,
    saved_flags,
    with_global_batch,
)
from lm.training.schedule import FROM_WEIGHTS, default_rates
from lm.training.starting_point import (
    StartingPoint,
    find_starting_points,
    set_aside,
    settings_of,
    write_settings,
)
from model import LMConfig

SFT = "train_sft_accelerate.py"


@pytest.fixture(autouse=True)
def locks():
    """Releases the locks of a test, which would otherwise last until the test process ends."""
    yield
    release_locks()


def find(out_dir: Path, **flags) -> StartingPoint:
    return find_starting_points([TrainingArguments(out_dir=str(out_dir), **flags)])[0]


def refused(out_dir: Path, **flags) -> str:
    return error_of(find, out_dir, **flags)


def make_run(path: Path, *steps: int) -> Path:
    """Make a run with empty metrics and checkpoints of these steps."""
    path.mkdir(parents=True)
    (path / "metrics.jsonl").touch()
    for step in steps:
        write_empty(RunFolder(path), step)
    return path


def write_empty(run: RunFolder, step: int, **state) -> None:
    """Write a checkpoint without tensors."""
    values = {"step": step, "processes": 1, "model": {}, "identity": {}} | state
    write_checkpoint(run, {WEIGHTS: {}, OPTIMIZER: {}, RANDOM: {}}, values)


def damage_file(run: Path, step: int) -> None:
    """Flip a bit of a checkpoint's file."""
    path = RunFolder(run).checkpoint(step) / OPTIMIZER
    contents = bytearray(path.read_bytes())
    contents[3] ^= 1
    path.write_bytes(contents)


def test_the_folder_of_a_new_run_is_its_name_or_the_time(tmp_path, capsys):
    assert find(tmp_path).folder.path.name.replace("-", "").isdigit()
    assert find(tmp_path, resume="auto", run_name="first").checkpoint is None
    assert "no checkpoint" in capsys.readouterr().out
    start = find(tmp_path, run_name="first")
    assert (start.folder.path, start.checkpoint, start.step) == (tmp_path / "first", None, 0)
    assert list(tmp_path.iterdir()) == []
    lock(start.folder.lock)
    set_aside(start)
    assert [path.name for path in start.folder.path.iterdir()] == ["lock"]
    assert "in use by process" in error_of(lock, start.folder.lock)


def test_a_run_of_another_program_is_refused(tmp_path):
    """The run is refused without --resume, with --resume auto, and with --resume PATH."""
    run = make_run(tmp_path / "first", 10)
    (run / "settings.json").write_text("{}")  # without "program": an old file of pretraining
    for resume in (None, "auto"):
        args = DistillationArguments(out_dir=str(tmp_path), run_name="first", resume=resume)
        with pytest.raises(UsageError, match=r"holds a run of train_pretrain\S+: choose another"):
            find_starting_points([args])
    (run / "settings.json").write_text(json.dumps({"program": SFT}))
    for named in (run, run / "checkpoints" / "step-00000010"):
        said = refused(tmp_path, resume=str(named))
        assert f"first holds a run of {SFT}: resume it with that program" in said


def test_auto_takes_the_newest_checkpoint_of_all_runs_or_of_the_named_run(tmp_path):
    older = make_run(tmp_path / "older", 10, 9000)
    newer = make_run(tmp_path / "newer", 9, 1000)
    for started, run in enumerate((older, newer)):
        RunFolder(run).settings.write_text(json.dumps({"started": started}))
    (newer / "checkpoints" / "step-00002000.partial-7").mkdir()
    assert find(tmp_path, resume="auto").checkpoint == RunFolder(newer).checkpoint(1000)
    start = find(tmp_path, resume="auto", run_name="older")
    assert (start.checkpoint, start.step) == (RunFolder(older).checkpoint(9000), 9000)


def test_the_path_of_a_run_or_of_a_checkpoint_can_be_resumed(tmp_path, monkeypatch):
    run = make_run(tmp_path / "runs" / "first", 10, 20)
    for here, named, step in ((run.parent, "first", 20), (run, "checkpoints/step-00000010", 10)):
        monkeypatch.chdir(here)
        start = find(tmp_path / "others", resume=named)
        assert (start.folder.path, start.checkpoint) == (run, RunFolder(run).checkpoint(step))
        assert find(tmp_path, resume=named, run_name="first").folder.path == run
        said = refused(tmp_path, resume=named, run_name="mine")
        assert said == f"--run_name mine: leave it out, {run} is resumed"
    assert "neither a run with checkpoints nor a checkpoint" in refused(tmp_path, resume="none")


def test_auto_reports_damaged_checkpoints_skips_them_and_sets_them_aside(tmp_path, capsys):
    """The weights are set aside too. A damaged checkpoint is refused when it is named."""
    run = RunFolder(make_run(tmp_path / "run", 1, 2, 3))
    run.weights.mkdir()
    damage_file(run.path, 3)
    said = refused(tmp_path, resume=str(run.checkpoint(3)))
    assert f"is damaged: the checksum of {OPTIMIZER} is wrong" in said
    start = find(tmp_path, run_name="run", resume="auto")
    assert (start.checkpoint, start.step) == (run.checkpoint(2), 2)
    assert f"DAMAGED CHECKPOINT {run.checkpoint(3)}: " in capsys.readouterr().err
    (run.checkpoint(3) / "state.json").unlink()
    assert find(tmp_path, resume=str(run.path)).step == 2
    assert len(run.all_checkpoints()) == 3
    set_aside(start)
    assert [path.name for path in run.all_checkpoints()] == ["step-00000001", "step-00000002"]
    assert list(run.checkpoints.glob("step-00000003.aside-*"))
    assert not run.weights.exists()
    assert len(list(run.path.glob("weights.aside-*"))) == 1
    for step in (1, 2):
        damage_file(run.path, step)
    assert "no undamaged checkpoint: " in refused(tmp_path, run_name="run", resume="auto")


CONFIG = LMConfig(dim=48, n_layers=3, n_heads=4, vocab_size=400)
MINE, OTHERS = (
    SimpleNamespace(
        description={"tokenizer_sha256": letter * 64},
        identity=letter * 16,
        kind=TEXT,
        segmentations=1,
    )
    for letter in "ab"
)


def saved_by(args: TrainingArguments, processes: int = 1, **changes) -> StartingPoint:
    """Return the checkpoint of a run with the model CONFIG, the data MINE and `processes`
    processes. `changes` are fields of the model's shape; None removes a field."""
    shape = {k: v for k, v in (CONFIG.to_dict() | changes).items() if v is not None}
    state = {"identity": run_identity(MINE, args, processes), "model": shape}
    run = RunFolder(Path("out/runs/saved"))
    return StartingPoint(run, run.checkpoint(10), state | {"processes": processes})


def resumed(
    start: StartingPoint, args: TrainingArguments, config=CONFIG, data=MINE, processes=1, **teacher
) -> TrainingArguments:
    filled = with_global_batch(start, args, processes)
    identity = run_identity(data, filled, processes, **teacher)
    require_same_run(start, shapes_of(config, args), identity)
    return filled


def not_the_same(start: StartingPoint, *now, **how) -> list[str]:
    """Resume, which must fail. Return the parts of the error, without the checkpoint's name."""
    line = error_of(resumed, start, *now, **how)
    return line.removeprefix(f"cannot resume {start.checkpoint}: ").split("; ")


def test_every_difference_is_listed_and_the_file_with_the_runs_flags_is_named():
    start = saved_by(TrainingArguments(batch_size=16))
    start.state["identity"]["teacher"] = "mine"
    args = TrainingArguments(batch_size=8, seed=7, optimizer="muon", resume="auto")
    config = dataclasses.replace(CONFIG, dim=64, n_layers=4)
    assert not_the_same(start, args, config, OTHERS, teacher="another") == [
        "data: aaaaaaaaaaaaaaaa in the checkpoint, bbbbbbbbbbbbbbbb now",
        "dim: 48 in the checkpoint, 64 now",
        "global_batch: 16 in the checkpoint, 8 now",
        "n_layers: 3 in the checkpoint, 4 now",
        "optimizer: adamw in the checkpoint, muon now",
        "seed: 42 in the checkpoint, 7 now",
        "teacher: mine in the checkpoint, another now",
        "tokenizer: aaaaaaaaaaaaaaaa in the checkpoint, bbbbbbbbbbbbbbbb now",
        f"the flags that resume it are in {start.folder.settings}",
    ]


def test_a_run_resumes_with_another_learning_rate_dropout_or_attention():
    """A field that the checkpoint does not have gets its default."""
    args = TrainingArguments(batch_size=4, accumulation_steps=2, learning_rate=1e-3)
    start = saved_by(args, rope_theta=None, tie_embeddings=None)
    now = dataclasses.replace(args, learning_rate=2e-3, resume="auto")
    config = dataclasses.replace(CONFIG, dropout=0.1, use_flash_attn=False)
    assert resumed(start, now, config) == now
    said = not_the_same(start, args, dataclasses.replace(CONFIG, rope_theta=1000.0))
    assert said[0] == f"rope_theta: {LMConfig.rope_theta} in the checkpoint, 1000.0 now"


@pytest.fixture
def decided(tmp_path):
    """Makes a run with these settings; returns what decides a resume of the run with typed flags.
    The training arguments and the model settings are one dictionary."""

    def decided(flags: str, arguments: dict, kind=TrainingArguments, **settings) -> dict:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        settings |= {"program": kind.program, "arguments": arguments}
        run = RunFolder(make_run(tmp_path / "run", 10))
        run.settings.write_text(json.dumps(settings), encoding="utf-8")
        words = ["--resume", "auto", "--out_dir", str(tmp_path), *flags.split()]
        args, model = decided_arguments(vars(build_parser(kind).parse_args(words)), kind)
        return vars(args) | model

    return decided


def test_a_resumed_run_keeps_its_rates_unless_they_are_typed(decided):
    """An old run has the same rate for all layers; a run from weights has that of its weights."""

    def rates(*how) -> tuple:
        return tuple(decided(*how)[name] for name in FROM_WEIGHTS)

    new = tuple(default_rates("adamw", LMConfig.dim, LMConfig.tie_embeddings).values())
    assert rates("", {}) == new
    assert rates("", {"learning_rate": 7e-4}) == (7e-4, 1, 1, 0.05)
    saved = {"learning_rate": 7e-4, "embedding_lr_factor": 3.0, "output_lr_factor": 2.0}
    saved["warmup_fraction"] = 0.25
    assert rates("", saved) == (7e-4, 3, 2, 0.25)
    assert rates("--learning_rate 1e-3", saved) == (1e-3, 3, 2, 0.25)
    assert rates("--output_lr_factor 5", saved) == (7e-4, 3, 5, 0.25)
    assert rates("--warmup_fraction 0.1", saved) == (7e-4, 3, 2, 0.1)
    assert rates("", saved, SFTArguments) == (7e-4, 3, 2, 0.25)
    assert rates("", {}, SFTArguments) == (1e-4, 1, 1, 0.05)


def test_typed_flags_decide_over_the_flags_of_the_run_but_not_those_of_a_launch(decided, tmp_path):
    saved = {"batch_size": 48, "sampled_softmax": 4, "gradient_checkpointing": "blocks"}
    saved |= {"tf32": False, "gone": 1, "keep_last": None, "run_name": "first", "resume": "x"}
    saved |= {"time_limit": 1.5, "deepspeed": "ds.json", "out_dir": "elsewhere"}
    model = {"dim": 48, "dropout": 0.1, "vocab_size": 400}
    kept = decided("--batch_size 24 --dropout 0.2", saved, model=model)
    expected = {"batch_size": 24, "sampled_softmax": 4, "gradient_checkpointing": "blocks"}
    expected |= {"tf32": False, "keep_last": TrainingArguments.keep_last, "dim": 48, "dropout": 0.2}
    expected |= {"time_limit": None, "deepspeed": None, "run_name": "run", "resume": "auto"}
    assert kept | expected == kept
    assert not kept.keys() & {"gone", "vocab_size"}
    assert decided("--run_name new", saved)["batch_size"] == TrainingArguments.batch_size
    typed = {"resume": "auto", "run_name": "run", "out_dir": str(tmp_path)}
    assert saved_flags(typed, TrainingArguments)["batch_size"] == 48
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert saved_flags(typed, TrainingArguments) == {}  # a new run starts


def test_a_typed_flag_replaces_the_flag_of_the_run_that_decides_the_same(decided, tmp_path):
    saved = {"max_steps": 9, "warmup_steps": 3, "lora_dim": 8}
    kept = decided("--epochs 2 --warmup_fraction 0.1", saved)
    assert (kept["epochs"], kept["max_steps"], kept["warmup_steps"]) == (2, None, None)
    assert decided("", saved)["max_steps"] == 9
    prepared = {"data": str(tmp_path), "conversations": "my.jsonl"}
    for flags, data, conversations in (
        ("", str(tmp_path), "my.jsonl"),
        ("--data mine", "mine", "builtin"),
        ("--conversations new.jsonl", None, "new.jsonl"),
    ):
        kept = decided(flags, saved | prepared, SFTArguments)
        assert (kept["data"], kept["conversations"]) == (data, conversations)
    assert decided("--lora_alpha 8", saved, SFTArguments)["lora_dim"] == 8
    for folder, data in ((tmp_path, str(tmp_path)), ("gone", TrainingArguments.data)):
        assert decided("", {"data": str(folder)})["data"] == data
    for flags, teacher in (("", "its own"), ("--teacher typed", "typed")):
        kept = decided(flags, {"teacher": "its own"}, DistillationArguments)
        assert kept["teacher"] == teacher


def test_a_resumed_run_keeps_its_threads_unless_the_machine_or_the_user_says_otherwise(
    decided, monkeypatch
):
    monkeypatch.setattr("lm.training.resume.available_cores", lambda: 4)
    environ = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "LOCAL_SIZE")}
    monkeypatch.setattr(os, "environ", environ | {"LOCAL_WORLD_SIZE": "2"})
    saved = {"threads": 3}
    assert decided("", saved, processes_per_machine=2)["threads"] == 3
    assert decided("--threads 1", saved, processes_per_machine=2)["threads"] == 1
    assert decided("", {"threads": 5}, processes_per_machine=2)["threads"] is None
    assert decided("", saved, processes_per_machine=1)["threads"] is None
    assert decided("", saved)["threads"] is None  # an older run
    os.environ["OMP_NUM_THREADS"] = "2"
    assert decided("", saved, processes_per_machine=2)["threads"] is None


def test_another_number_of_processes_keeps_the_global_batch():
    start = saved_by(TrainingArguments(batch_size=4), processes=6)
    args = TrainingArguments(batch_size=4, accumulation_steps=1)
    expected = dataclasses.replace(args, accumulation_steps=3)
    assert resumed(start, args, processes=2) == expected
    other = TrainingArguments(batch_size=5)  # the global batch is no multiple of 5
    said = not_the_same(start, other, processes=2)
    assert said[0] == "global_batch: 24 in the checkpoint, 10 now"


def test_a_resumed_run_reads_the_weights_in_its_own_folder(tmp_path, monkeypatch):
    """--init_from may be gone. In a new run it is read."""
    run, read = RunFolder(make_run(tmp_path / "run", 1)), []
    find_weights = SimpleNamespace(find=lambda name, *where: read.append(name))
    monkeypatch.setattr("lm.training.inputs.WeightsFolder", find_weights)
    args = TrainingArguments(out_dir=str(tmp_path), init_from="gone", data=str(tmp_path))
    start = StartingPoint(run)
    choose_sources(args, {}, start)
    start = dataclasses.replace(start, checkpoint=run.checkpoint(1))
    choose_sources(args, {}, start)
    run.base.mkdir()
    choose_sources(args, {}, start)
    assert read == ["gone", str(run.checkpoint(1)), str(run.base)]


@pytest.fixture
def write(tmp_path, accelerator):
    """Writes settings of a run into tmp_path; returns its folder."""

    def write(args: TrainingArguments, tokenizer: str = "elsewhere.model") -> RunFolder:
        (tmp_path / tokenizer).write_bytes(b"pieces")
        engine = Engine(accelerator, "DeepSpeed ZeRO-2", {"train_batch_size": 24})
        data = SimpleNamespace(tokenizer_path=tmp_path / tokenizer, kind=args.dataset.kind)
        write_settings(RunFolder(tmp_path), settings_of(args, CONFIG, engine), data)
        return RunFolder(tmp_path)

    return write


def test_the_settings_file_has_the_flags_model_engine_and_packages(write):
    args = TrainingArguments(batch_size=3, run_name="mine", time_limit=1.5)
    run = write(args)
    settings = json.loads(run.settings.read_text(encoding="utf-8"))
    assert settings["arguments"] == vars(args)
    assert settings["model"] == CONFIG.to_dict()
    assert (settings["engine"], settings["processes"]) == ("DeepSpeed ZeRO-2", 1)
    assert settings["deepspeed"] == {"train_batch_size": 24}
    assert settings["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_a_resume_lists_what_changed_since_the_run_was_stopped(write, accelerator):
    saved = TrainingArguments(learning_rate=1e-3, time_limit=1.5)
    run = write(saved)
    start = StartingPoint(run, run.checkpoint(10), {"step": 10, "processes": 1})
    engine = Engine(accelerator, "DeepSpeed ZeRO-2", {"train_batch_size": 24})
    same = dataclasses.replace(saved, resume="auto", run_name="mine")
    assert changes_since_stop(start, settings_of(same, CONFIG, engine)) == []
    args = dataclasses.replace(same, learning_rate=2e-3, time_limit=None)
    config = dataclasses.replace(CONFIG, dropout=0.1)
    settings = json.loads(run.settings.read_text(encoding="utf-8"))
    run.settings.write_text(json.dumps(settings | {"engine": "DDP", "processes": 2}))
    now = settings_of(args, config, engine)
    assert sorted(changes_since_stop(start, now)) == [
        "changed since the run was stopped: --dropout 0.0 → 0.1",
        "changed since the run was stopped: --learning_rate 0.001 → 0.002",
        "changed since the run was stopped: --time_limit 1.5 → None",
        "changed since the run was stopped: engine DDP → DeepSpeed ZeRO-2",
        "changed since the run was stopped: processes 2 → 1",
    ]
    assert changes_since_stop(StartingPoint(run), now) == []
    run.settings.unlink()
    assert changes_since_stop(start, now) == []


def test_a_new_run_deletes_the_tokenizer_of_an_earlier_run_in_its_folder(write, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    run = write(TrainingArguments(), tokenizer="other/tokenizer.json")
    assert (run.tokenizer.name, run.tokenizer.read_bytes()) == ("tokenizer.json", b"pieces")
    assert write(TrainingArguments()).tokenizer.name == "tokenizer.model"
    assert not list(run.path.glob("tokenizer*.json"))


@pytest.mark.parametrize("settings", [None, b"\xff", b"[]"])
def test_an_unreadable_settings_file_gives_no_settings(tmp_path, settings):
    if settings is not None:
        RunFolder(tmp_path).settings.write_bytes(settings)
    assert read_settings(RunFolder(tmp_path).settings) == {}
