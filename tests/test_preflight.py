"""Before run_accelerate.sh starts processes, it checks the launch and chooses the flags."""

import importlib
import json
import os
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from conftest import REPOSITORY, error_of, pack
from small_model import save_model
from test_resume_choice import make_run

from lm.common.errors import TooLittleMemoryError, UsageError
from lm.data.dataset import PackedDataset
from lm.engine.deepspeed_config import read_config
from lm.engine.hardware import GIB
from lm.engine.memory import MARGIN, OVERHEAD, Workload, estimate
from lm.engine.strategy import strategies, strategy_of
from lm.launch import preflight, speed, time_budget
from lm.launch.preflight import check_launch, main
from lm.launch.recipe import SHAPES, shape_settings
from lm.launch.shell_variables import ShellVariables
from lm.storage.folder import RunFolder
from lm.training import measurement
from lm.training.arguments import build_parser, parse_arguments
from lm.training.inputs import shapes_of
from lm.training.measurement import Measured
from lm.training.resume import run_identity
from lm.training.schedule import FROM_WEIGHTS
from model import ConfigError, LMConfig, Transformer

TINY = ["--dim", "32", "--n_layers", "1", "--n_heads", "4", "--max_seq_len", "32"]
CONFIG = LMConfig(dim=32, n_layers=1, n_heads=4, max_seq_len=32, vocab_size=400)
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


def check(config_file: str, processes: int, flags: list[str]):
    return check_launch(config_file, processes, vars(build_parser().parse_args(flags)))


def refused(config_file: str, flags: list[str], processes: int = 1) -> str:
    return error_of(check, config_file, processes, flags, error=(UsageError, ConfigError))


@pytest.mark.parametrize(
    ("more", "keyword"),
    [
        (["--nonsense"], "--nonsense"),
        (["--dim", "7"], "dim 7"),
        (["--max_seq_len", "100000"], "use other text or a shorter --max_seq_len"),
        (["--data", "nothing/here"], "nothing/here"),
        (["--init_from", "no/weights"], "no/weights: no such folder"),
        (["--resume", "no/run"], "--resume no/run: neither a run with checkpoints nor a"),
        (["--dtype", "float16"], "--dtype float16 needs a GPU"),
        (["--deepspeed", "configs/zero1.json"], "launcher's DeepSpeed file is ds_config.json"),
        (["--log_with", "wandb"], "pip install wandb"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, more, keyword, monkeypatch):
    there = importlib.util.find_spec
    absent = lambda name: None if name == "wandb" else there(name)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", absent)
    assert keyword in refused(ZERO_2, [*flags, *more])


def test_tasks_are_machines_only_if_their_number_is_set(monkeypatch):
    task = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "NUM_MACHINES": "", "STAGE": "dpo"}
    monkeypatch.setattr(os, "environ", os.environ | task)
    assert "srun has started this command several times" in error_of(preflight.main, [])
    os.environ["NUM_MACHINES"] = "2"
    assert "STAGE must be" in error_of(preflight.main, [])
    assert "SLURM_NTASKS" not in os.environ


@pytest.mark.parametrize(
    ("changes", "keyword"),
    [
        ({"num_procesess": 2}, "num_procesess"),
        ({"mixed_precision": "bf16"}, "mixed_precision"),
        ({"ds_config": "{]"}, "no readable JSON"),
        ({"deepspeed_config": {"deepspeed_config_file": "no/where.json"}}, "no/where.json"),
        ({"num_machines": 2}, "2 machines: set NUM_MACHINES"),
        ({"dynamo_config": {"dynamo_backend": "EAGER"}}, "use --compile on"),
        (DDP | {"dynamo_config": {"backend": "inductor"}}, "use --compile on"),
        (DDP | {"distributed_type": "FSDP"}, "the launcher's engine FSDP is not supported"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(flags, config_file, changes, keyword):
    assert keyword in refused(config_file(**changes), flags)


@pytest.mark.parametrize("text", [None, "a: b: c", "[1, 2]", "", "distributed_type: NONSENSE\n"])
def test_the_error_names_a_file_that_is_no_launcher_configuration(flags, tmp_path, text):
    path = tmp_path / "broken.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert "broken.yaml" in refused(str(path), flags)


@pytest.mark.parametrize("by_flag", [False, True])
def test_the_number_of_processes_is_part_of_the_global_batch(flags, config_file, tmp_path, by_flag):
    """The launcher's file or the flag --deepspeed names the DeepSpeed file."""
    path = config_file({"zero_optimization": {"stage": 2}, "train_batch_size": 16})
    if by_flag:
        path = config_file(**DDP | {"mixed_precision": None})
        flags = [*flags, "--deepspeed", str(tmp_path / "ds.json")]
    check(path, 2, flags)
    assert "gives 32" in refused(path, flags, 4)


@pytest.fixture
def weights(packed, tmp_path) -> str:
    """A folder with the weights of a tiny model."""
    return str(save_model(tmp_path / "weights", Transformer(CONFIG), packed))


@pytest.fixture
def run_of(flags, packed, tmp_path):
    """Makes a run that one process saved with these flags."""

    def run_of(*more: str):
        args, _ = parse_arguments([*flags, *more])
        train_set = PackedDataset(packed, "train", CONFIG.max_seq_len)
        state = {"identity": run_identity(train_set, args, 1), "model": CONFIG.to_dict()}
        path = make_run(tmp_path / "runs" / "saved", 10, **state)
        values = {"arguments": vars(args), "model": CONFIG.to_dict()}
        settings = json.dumps(values, default=str)
        RunFolder(path).settings.write_text(settings, encoding="utf-8")
        return path

    return run_of


def test_a_run_to_resume_is_checked_and_not_touched(flags, run_of, capsys):
    run = run_of()
    before = {path: path.stat().st_mtime_ns for path in run.parent.rglob("*")}
    here = [*flags, "--out_dir", str(run.parent), "--run_name", run.name]
    check(ZERO_2, 1, [*here, "--resume", "auto"])
    capsys.readouterr()  # importing DeepSpeed may print a warning
    said = refused(ZERO_2, here)
    assert f"{run} holds a run: pass --resume auto, or another --run_name" in said
    resumed = [*flags, "--resume", str(run)]
    check(ZERO_2, 2, [*resumed, "--batch_size", "2"])
    assert {path: path.stat().st_mtime_ns for path in run.parent.rglob("*")} == before
    assert capsys.readouterr().out == ""
    (RunFolder(run).checkpoint(10) / "state.json").write_text("{}", encoding="utf-8")
    assert "is damaged" in refused(ZERO_2, resumed)


def test_a_run_to_resume_is_checked_with_the_flags_that_are_not_typed(packed, run_of):
    """The training program takes these flags over by itself, so the launch does not name them."""
    typed = ["--data", str(packed), "--resume", str(run_of("--batch_size", "48"))]
    assert check(ZERO_2, 1, typed)[0].args.batch_size == 48
    said = refused(ZERO_2, [*typed, "--batch_size", "24"])
    assert "global_batch: 48 in the checkpoint, 24 now" in said
    assert main(typed)[-5:] == ["train_pretrain_accelerate.py", *typed]


@pytest.mark.parametrize(
    "typed", ["--dimm 4", "--batch_size 0", "--dtype float17", "--resume no/run"]
)
def test_a_mistake_is_refused_before_text_is_prepared(monkeypatch, typed):
    monkeypatch.setattr(ShellVariables, "data_flags", lambda *_: pytest.fail("prepares text"))
    with pytest.raises(UsageError, match=typed.split()[0]):
        preflight.main(typed.split())
    monkeypatch.setitem(os.environ, "CONFIG", "none.yaml")
    assert "none.yaml" in error_of(preflight.main, [])


def test_the_data_of_a_resumed_run_stays_and_other_data_is_refused(corpus, tmp_path, monkeypatch):
    text, out = tmp_path / "mine.jsonl", tmp_path / "out" / "data" / "mine"
    shutil.copy(corpus, text)
    pack(text, out)
    saved = RunFolder(make_run(tmp_path / "runs" / "saved", 10))
    saved.settings.write_text(json.dumps({"arguments": {"data": str(out)}}), encoding="utf-8")
    monkeypatch.setattr("lm.launch.shell_variables.default_out", lambda *_: out)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("prepares text"))
    words = ["--resume", str(saved.path)]
    assert main(words)[-2:] == words
    monkeypatch.setitem(os.environ, "DATA", str(text))
    os.utime(text, (0, 0))  # the same text
    assert main(words)[-2:] == words
    with open(text, "a", encoding="utf-8") as file:
        file.write('{"text": "one more"}\n')
    said = error_of(main, words)
    assert said.startswith(f"DATA: not what {saved.path} was trained on; its data stays in {out}.")
    assert f"pass --data {out} instead" in said
    assert f"--init_from {saved.path}" in said


def test_a_resumed_run_keeps_its_precision_on_a_cpu_that_emulates_bf16(flags, run_of, monkeypatch):
    monkeypatch.setattr(preflight, "cpu_emulates_bf16", lambda: True)
    resumed = " ".join(preflight.main([*flags, "--resume", str(run_of("--dtype", "bfloat16"))]))
    assert "float32" not in resumed


def test_a_yaml_decides_the_precision_and_a_stage_without_a_file(flags, config_file, monkeypatch):
    section = {"zero_stage": 1, "offload_optimizer_device": "none", "zero3_init_flag": False}
    path = config_file(deepspeed_config=section, mixed_precision="no")
    monkeypatch.setitem(os.environ, "CONFIG", path)
    words = preflight.main([*flags, "--max_steps", "2"])
    assert "--dtype=float32" in words
    assert check(path, 2, flags)[1]["zero_optimization"]["stage"] == 1
    del os.environ["WORLD_SIZE"]  # the command sets it
    with pytest.raises(UsageError, match=r"or type --dtype float32$"):
        preflight.main([*flags, "--max_steps", "2", "--dtype", "bfloat16"])


def bytes_for(batch_size: int, processes: int = 3) -> int:
    """Return the bytes that training the tiny model with this batch needs on a GPU under ZeRO-2."""
    args, _ = parse_arguments(["--batch_size", str(batch_size)])
    work = Workload(
        args=args,
        shapes=shapes_of(CONFIG, args),
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
    monkeypatch.setattr(speed, "available_memory", lambda device, n: free[device.index])
    made = budget_of(flags, monkeypatch, processes=3)
    made.device = made.meter.device = torch.device("cuda")
    settings = {"n_layers": 1, "dim": 32, "n_heads": 4, "max_seq_len": 32, "tie_embeddings": True}
    assert made.candidate(settings).rows == rows


@pytest.mark.parametrize("segmentations", [1, 20])
def test_a_small_text_keeps_one_matrix_for_both_ends(flags, monkeypatch, segmentations):
    made = budget_of(flags, monkeypatch)
    made.inputs.train_set.segmentations = segmentations
    for model in made.models():
        assert model.settings["tie_embeddings"] is (segmentations > 1)
    made.typed["tie_embeddings"] = False
    assert not any(model.settings["tie_embeddings"] for model in made.models())


@pytest.mark.parametrize(
    ("n_first", "more", "noise"),
    [(9, {}, True), (0, {}, False), (9, {"source": 1}, False), (9, {"teacher": 1}, False)],
)
def test_a_new_model_gets_noise_in_a_text_in_several_segmentations(
    flags, monkeypatch, n_first, more, noise
):
    made = budget_of(flags, monkeypatch)
    pretend(monkeypatch)
    plan = made.plan()
    monkeypatch.setattr(made, "plan", lambda: plan)
    made.inputs.train_set.n_first = n_first
    made.inputs, made.fixed = replace(made.inputs, **more), "source" in more
    assert ("token_noise" in made.flags()) is noise


@pytest.mark.parametrize(
    ("device", "pieces", "more", "tokens", "sampled"),
    [
        ("cpu", 8192, {}, 4096, 16),
        ("cpu", 8192, {}, 8192, 16),
        ("cpu", 8192, {}, 1024, 4),
        ("cpu", 8192, {}, 256, None),
        ("cpu", 8192, {"knows_steps": True}, 4096, 16),
        ("cpu", 4096, {}, 4096, None),
        ("cuda", 8192, {}, 4096, None),
        ("cpu", 8192, {"fixed": True}, 4096, None),
        ("cpu", 8192, {"teacher": 1}, 4096, None),
    ],
)
def test_a_new_model_on_a_cpu_samples_pieces_in_its_loss(
    flags, monkeypatch, device, pieces, more, tokens, sampled
):
    made = budget_of(flags, monkeypatch)
    pretend(monkeypatch)
    plan = made.plan()
    model = replace(plan.model, rows=tokens // plan.model.length)
    monkeypatch.setattr(made, "plan", lambda: replace(plan, model=model))
    made.device = torch.device(device)
    config = replace(made.inputs.config, vocab_size=pieces)
    made.inputs = replace(made.inputs, config=config, teacher=more.get("teacher"))
    made.fixed, made.knows_steps = "fixed" in more, "knows_steps" in more
    assert made.flags().get("sampled_softmax") == sampled


def test_a_model_that_does_not_fit_is_no_candidate(packed, monkeypatch):
    typed = ["--data", str(packed)]
    for free, largest in ((2**40, 2048), (2 * GIB, 512), (0, 64)):
        monkeypatch.setattr(speed, "available_memory", lambda device, n, free=free: free)
        *_, last = budget_of(typed, monkeypatch).models()
        assert last.settings["dim"] <= largest
        assert (last.settings["dim"] == 2048) is (free == 2**40)
        assert last.rows >= 1
    monkeypatch.setattr(speed, "available_memory", lambda device, n: 3 * GIB)
    *_, last = budget_of([*typed, "--batch_size", "4096"], monkeypatch).models()
    assert last.rows == 4096  # typed
    assert last.settings["dim"] < 256


def test_one_process_measures_fewer_sequences_than_fit_into_a_share_and_scales(flags, monkeypatch):
    asked = pretend(monkeypatch)
    made = budget_of(flags, monkeypatch, processes=2)
    model = replace(made.models()[0], rows=8, rows_alone=2)
    settings = {"dim": 32, "n_layers": 1, "max_seq_len": 32}
    part = made.meter.measure(model, settings, ()).micro_batch
    alone = replace(model, rows=2, rows_alone=2)
    assert part == pytest.approx(4 * made.meter.measure(alone, settings, ()).micro_batch)
    assert [each["batch_size"] for each in asked] == [2, 2]


@pytest.mark.parametrize(("busy", "threads"), [(0, 4), (1, 3), (2, 2)])
def test_the_run_gets_the_number_of_threads_that_is_fastest_beside_other_programs(
    packed, monkeypatch, busy, threads
):
    pretend(monkeypatch, cores=4, busy=busy)
    found = budget_of(["--data", str(packed)], monkeypatch).flags()
    assert found["threads"] == threads
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "3")
    assert "threads" not in budget_of(["--data", str(packed)], monkeypatch).flags()
    del os.environ["OMP_NUM_THREADS"]
    typed = ["--data", str(packed), "--threads", "1"]
    assert "threads" not in budget_of(typed, monkeypatch).flags()


@pytest.mark.parametrize("processes", [2, 4])
def test_the_processes_of_a_run_share_the_cores(flags, monkeypatch, processes):
    pretend(monkeypatch, cores=4)
    made = budget_of(flags, monkeypatch, processes)
    assert max(made.meter.thread_counts) == 4 // processes


def test_a_busy_machine_trains_the_model_of_a_machine_with_fewer_cores(packed, monkeypatch):
    """Not a much smaller one, in steps that wait for threads."""
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    found = []
    for cores, busy in ((2, 1), (1, 0)):
        pretend(monkeypatch, cores=cores, busy=busy)
        found.append(budget_of(["--data", str(packed)], monkeypatch).flags())
    for name in ("dim", "n_layers", "batch_size"):
        assert found[0][name] == found[1][name]
    assert found[0]["max_steps"] == pytest.approx(found[1]["max_steps"], rel=0.02)


@pytest.mark.parametrize("minutes", ["0.5", "4", "10000"])
@pytest.mark.parametrize("slow", [1, 100])
def test_measuring_takes_at_most_a_fifth_of_the_time_or_one_measurement(
    packed, monkeypatch, minutes, slow
):
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    asked = pretend(monkeypatch, slow=slow, takes=10)
    budget_of(["--data", str(packed)], monkeypatch, MINUTES=minutes).flags()
    searched = [each for each in asked if each["compile"] == "off"]
    most = min(0.2 * 60 * float(minutes), time_budget.MOST_MEASURING)
    assert 1 <= len(searched) <= max(1, most // 10)


def test_a_model_that_fits_only_when_it_is_divided_is_not_measured(flags, monkeypatch, capsys):
    asked = pretend(monkeypatch)
    made = budget_of(flags, monkeypatch, processes=2)
    model = replace(made.models()[0], rows=8, rows_alone=0)
    assert made.speed(model) == made.meter.assumed(model)
    assert asked == []
    assert "too little memory to be measured" in capsys.readouterr().out


def test_what_is_not_measured_any_more_is_scaled_from_what_was(packed, monkeypatch):
    pretend(monkeypatch, slow=7)
    made = budget_of(["--data", str(packed)], monkeypatch)
    small, *_, large = made.models()
    before = made.meter.assumed(large).micro_batch / made.meter.assumed(small).micro_batch
    measured = made.speed(small)
    made.meter.until = 0
    assert made.speed(small) == measured
    scaled = made.speed(large).micro_batch / measured.micro_batch
    assert scaled == pytest.approx(before)


def test_memory_that_runs_out_ends_the_search_for_a_larger_model(packed, monkeypatch):
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    asked = pretend(monkeypatch, slow=0.01)
    measure = speed.measure

    def small_only(kind, flags, threads, seconds):
        if flags["dim"] > 96 or flags["batch_size"] > 8:
            raise TooLittleMemoryError("out of memory")
        return measure(kind, flags, threads, seconds)

    monkeypatch.setattr(speed, "measure", small_only)
    made = budget_of(["--data", str(packed)], monkeypatch, MINUTES="999")
    found = made.flags()
    assert (found["dim"], found["batch_size"]) == (96, 8)
    assert asked
    made = budget_of(["--data", str(packed), "--dim", "128"], monkeypatch, MINUTES="999")
    assert "out of memory" in error_of(made.flags, error=TooLittleMemoryError)


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
    flags = budget_of(["--data", str(packed)], monkeypatch, MINUTES=minutes).flags()
    assert flags["compile"] == ("on" if compiles else "off")
    tried = [each for each in asked if each["compile"] == "on"]
    assert len(tried) == (compiles is not None)
    assert all(each["batch_size"] == flags["batch_size"] for each in tried)


@pytest.mark.parametrize(("waited", "counts"), [(20, True), (130, False)])
def test_a_long_preparation_does_not_count(packed, monkeypatch, capsys, waited, counts):
    """A text or conversations: the preparation takes no CPU time of this process."""
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: time.time() - waited - 5)
    monkeypatch.setattr(time, "process_time", lambda: 5.0)
    made = budget_of(["--data", str(packed)], monkeypatch, started=None)
    left = 240 - 5 - 2 * time_budget.LAUNCH_SHARE - waited * counts
    assert made.left() == pytest.approx(left, abs=1)
    assert ("the 4 min begin now" in capsys.readouterr().out) is not counts


@pytest.mark.parametrize(
    ("environ", "size", "said"),
    [
        ({"DATA": "{file}"}, 10_000_000_000, "preparing 10.0 GB may take about 21 min"),
        ({"DATA": "{file}"}, 10_000_000, ""),
        ({"CHAT": "{file}", "STAGE": "sft"}, 1_000_000_000, "preparing 1.0 GB may take about 21"),
        ({"STAGE": "distill"}, 1, ""),
        ({}, 1, ""),
    ],
)
def test_a_long_preparation_is_announced(monkeypatch, tmp_path, capsys, environ, size, said):
    monkeypatch.setattr(preflight, "available_cores", lambda: 2)
    file = tmp_path / "a.jsonl"
    with open(file, "wb") as sparse:
        sparse.truncate(size)
    environ = {name: value.format(file=file) for name, value in environ.items()}
    preflight.announce_preparation(ShellVariables({"MINUTES": "10"} | environ, []))
    out = capsys.readouterr().out
    assert said in out
    assert bool(said) == bool(out)


def budget_of(
    flags: list[str],
    monkeypatch,
    processes: int = 1,
    config: str = ZERO_2,
    started: float | None = 0.0,
    **environ,
):
    """Return the `TimeBudget` of a command that started just now (None: when it did)."""
    request = ShellVariables({"CONFIG": config} | environ, flags)
    typed = vars(build_parser(request.kind).parse_args(flags))
    shape = shape_settings(*SHAPES[0], typed)
    inputs, deepspeed = check_launch(config, processes, typed | shape)
    made = time_budget.TimeBudget(request, inputs, deepspeed, typed, processes, loading=2.0)
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
    long. A compiled step takes the share `saves` less. A measurement takes `takes` seconds. Return
    a list to which each measurement appends its flags."""
    asked, now = [], [0.0]

    def measure(kind, flags, threads, seconds):
        asked.append(flags)
        now[0] += takes
        tokens = flags["batch_size"] * flags["max_seq_len"]
        work = slow * (0.02 + 1e-11 * tokens * (12 * flags["n_layers"] * flags["dim"] ** 2 + 5e5))
        work *= 1 - saves * (flags["compile"] == "on")
        free = max(1, cores - busy)
        times = {n: work / n if n <= free else 10 * work / free for n in threads or (free,)}
        best = min(times, key=times.get)
        return Measured(
            times[best], times[best] / flags["batch_size"] / 3, best if threads else None
        )

    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(speed, "available_cores", lambda: cores)
    if takes:
        monkeypatch.setattr(speed.time, "time", lambda: now[0])
    monkeypatch.setattr(time_budget, "obstacle", lambda device: None)
    return asked


def test_more_minutes_give_more_steps_and_the_chosen_model_is_printed(packed, monkeypatch, capsys):
    asked = pretend(monkeypatch)
    monkeypatch.setattr(time_budget, "MOST_PASSES", 1e9)
    chosen = [
        budget_of(["--data", str(packed)], monkeypatch, MINUTES=m).flags() for m in ("1", "99")
    ]
    assert 200 <= chosen[0]["max_steps"] < chosen[1]["max_steps"]
    said = capsys.readouterr().out
    assert f"recipe: 1 min for {chosen[0]['n_layers']} layers of dim {chosen[0]['dim']}" in said
    assert "4 min would train" in said
    assert {flags["deepspeed"] for flags in asked} == {"ds_config.json"}
    assert {flags["data"] for flags in asked} == {str(packed)}


def test_a_text_that_is_too_small_for_the_time_is_reported(packed, monkeypatch, capsys):
    pretend(monkeypatch)
    flags = budget_of(["--data", str(packed)], monkeypatch, MINUTES="10000").flags()
    assert "more text would help" in capsys.readouterr().out
    assert flags["max_steps"] < 10_000


def test_the_dial_and_the_run_count_the_same_flops_with_a_teacher(packed, monkeypatch):
    """Otherwise the time that a plan expects would be wrong."""
    made = budget_of(["--data", str(packed)], monkeypatch)
    alone = made.inputs.flops_per_token
    teacher = SimpleNamespace(shapes=made.inputs.shapes)
    made.inputs = replace(made.inputs, teacher=teacher)
    assert made.candidate({}).flops == made.inputs.flops_per_token > alone


def test_nothing_is_measured_if_the_typed_flags_decide_the_steps(flags, monkeypatch):
    asked = pretend(monkeypatch)
    typed = [*flags, "--max_steps", "7", "--learning_rate", "0.5"]
    added = budget_of(typed, monkeypatch).flags()
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
        made = budget_of(typed, monkeypatch, 4, "configs/multi_node.yaml", **place)
        made.started -= 30 * int(rank)  # the second machine began earlier
        chosen.append(made.flags())
    assert chosen[0] == chosen[1]
    assert asked == []


@pytest.mark.parametrize(
    ("environ", "words", "says"),
    [
        ({}, "--data {packed} --n_kv_heads 4", "2 layers of dim 64"),
        ({}, "--data {packed} --n_heads 64", "of dim 128"),
        ({}, "--data {packed} --dim 48 --deepspeed ds_config.json", "2 layers of dim 48"),
        ({}, "--data {packed} --init_from {weights}", "1 layer of dim 32"),
        ({"STAGE": "sft", "CHAT": "{chat}"}, "--init_from {weights}", "1 layer of dim 32"),
        ({"STAGE": "distill", "TEACHER": "{weights}"}, "--data {packed}", "2 layers of dim 64"),
        (
            {"STAGE": "distill", "TEACHER": "{weights}"},
            "--data {packed} --init_from {weights}",
            "1 layer of dim 32",
        ),
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


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "zero2_offload"])
def test_engines_that_support_muon_get_muon(name, flags, monkeypatch):
    pretend(monkeypatch)
    strategy = next(strategy for strategy in strategies() if strategy.config == name)
    made = budget_of([*flags, "--max_steps", "9"], monkeypatch, config=f"configs/{name}.yaml")
    assert made.flags()["optimizer"] == ("muon" if strategy.takes_muon else "adamw")
    typed = [*flags, "--max_steps", "9", "--optimizer", "adamw"]
    added = budget_of(typed, monkeypatch, config=f"configs/{name}.yaml").flags()
    assert "muon_learning_rate" not in added


def test_a_larger_batch_has_a_higher_rate_beside_muon(packed, monkeypatch):
    pretend(monkeypatch)
    typed = ["--data", str(packed), "--max_steps", "9", "--accumulation_steps"]
    found = [budget_of([*typed, str(n)], monkeypatch).flags() for n in (1, 4)]
    assert found[1]["learning_rate"] == pytest.approx(2 * found[0]["learning_rate"], rel=0.05)


@pytest.mark.parametrize("emulates", [True, False])
def test_the_launcher_gets_the_engine_the_processes_and_all_flags(packed, monkeypatch, emulates):
    monkeypatch.setattr(preflight, "cpu_emulates_bf16", lambda: emulates)
    words = [*TINY, "--data", str(packed), "--max_steps", "2", "--no-use_flash_attn"]
    monkeypatch.setattr(os, "environ", os.environ | {"NUM_PROCESSES": "2", "ENGINE": "zero1"})
    arguments = main(words)
    assert arguments[:4] == ["--config_file", "configs/zero1.yaml", "--num_processes", "2"]
    program = arguments.index("train_pretrain_accelerate.py")
    parsed = vars(build_parser().parse_args(arguments[program + 1 :]))
    assert (parsed["dim"], parsed["max_steps"], parsed["optimizer"]) == (32, 2, "muon")
    assert parsed["use_flash_attn"] is False
    assert parsed.get("dtype") == ("float32" if emulates else None)
    del os.environ["WORLD_SIZE"]  # the command sets it
    typed = main([*words, "--dtype", "bfloat16"])
    assert vars(build_parser().parse_args(typed[program + 1 :]))["dtype"] == "bfloat16"
