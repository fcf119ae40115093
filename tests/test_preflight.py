import json
import os
import random
import shutil

import pytest
import torch
import yaml
from conftest import REPOSITORY
from test_resume_choice import make_run

from common.errors import UsageError
from data.dataset import PackedDataset
from data.errors import DataError
from data.tokenizer import TOKENIZER_FILE
from formats.portable import WEIGHTS_FILE, save_portable
from model import ConfigError, LMConfig, Transformer
from runs.folder import RunFolder
from training import preflight
from training.arguments import parse_arguments
from training.engine import workload
from training.engine.deepspeed_config import read_config
from training.engine.kinds import kind_of
from training.engine.memory import GIB, needs
from training.engine.workload import Parameters, Workload
from training.sft_arguments import SFTArguments
from training.preflight import check_launch
from training.resume import run_identity

TINY = ["--dim", "32", "--n_layers", "1", "--n_heads", "4", "--max_seq_len", "32"]
ZERO_2 = "accelerate_config.yaml"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    """As run_accelerate.sh calls it; the environment is restored after the test."""
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


def refused(config_file: str, flags: list[str], processes: str = "1", error=UsageError) -> str:
    with pytest.raises(error) as raised:
        check_launch(config_file, processes, flags)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("processes", ["1", "4"])
def test_a_launch_that_works_passes(flags, processes):
    check_launch(ZERO_2, processes, flags)


def test_a_launch_without_deepspeed_passes(flags, config_file):
    ddp = {"distributed_type": "MULTI_GPU", "deepspeed_config": {}, "mixed_precision": "bf16"}
    check_launch(config_file(**ddp), "2", flags)


@pytest.mark.parametrize("processes", ["0", "-1", "two", "", "1.5"])
def test_a_number_of_processes_that_is_none_is_refused(flags, processes):
    assert "number of processes" in refused(ZERO_2, flags, processes)


def test_bad_flags_are_refused(flags):
    assert "--nonsense" in refused(ZERO_2, [*flags, "--nonsense"])


def test_a_bad_shape_is_refused(flags):
    assert "dim 7" in refused(ZERO_2, [*flags, "--dim", "7"], error=ConfigError)


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_a_tracker_that_is_not_installed_is_refused(flags, tracker, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert f"pip install {tracker}" in refused(ZERO_2, [*flags, "--log_with", tracker])


def test_a_missing_configuration_is_refused_by_name(flags, tmp_path):
    assert "missing.yaml" in refused(str(tmp_path / "missing.yaml"), flags)


@pytest.mark.parametrize("text", ["a: b: c", "[1, 2]", "", "distributed_type: NONSENSE\n"])
def test_a_file_that_is_no_launcher_configuration_is_refused_by_name(flags, tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text, encoding="utf-8")
    assert "broken.yaml" in refused(str(path), flags)


def test_a_configuration_for_several_machines_wants_to_know_which_this_is(flags, monkeypatch):
    assert "2 machines: start each with NUM_MACHINES" in refused("configs/multi_node.yaml", flags)
    monkeypatch.setitem(os.environ, "NUM_MACHINES", "2")
    check_launch("configs/multi_node.yaml", "2", flags)


def test_an_unknown_key_is_refused_by_name(flags, config_file):
    assert "num_procesess" in refused(config_file(num_procesess=2), flags)


def test_a_precision_beside_a_deepspeed_file_is_refused(flags, config_file):
    assert "mixed_precision" in refused(config_file(mixed_precision="bf16"), flags)


def test_a_deepspeed_file_that_is_not_json_is_refused(flags, config_file):
    message = refused(config_file(ds_config="{'a': 1}"), flags)
    assert "ds.json" in message
    assert "not JSON" in message


def test_a_deepspeed_file_that_is_missing_is_refused(flags, config_file, tmp_path):
    path = str(tmp_path / "nowhere.json")
    message = refused(config_file(deepspeed_config={"deepspeed_config_file": path}), flags)
    assert path in message


def test_the_same_deepspeed_file_on_the_script_passes(flags):
    check_launch(ZERO_2, "1", [*flags, "--deepspeed", "ds_config.json"])


def test_another_deepspeed_file_on_the_script_is_refused(flags):
    message = refused(ZERO_2, [*flags, "--deepspeed", "other.json"])
    assert message == (
        "--deepspeed is other.json, but the launcher's DeepSpeed file is ds_config.json: name one "
        "of them"
    )


def test_a_deepspeed_file_on_the_script_is_checked_where_the_launcher_names_none(
    flags, config_file, tmp_path
):
    ddp = config_file(distributed_type="MULTI_GPU", deepspeed_config={})
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": 16}')
    batch = ["--deepspeed", str(path), "--batch_size", "8"]
    check_launch(ddp, "2", [*flags, *batch])
    assert "32" in refused(ddp, [*flags, *batch], "4")


def test_a_contradiction_between_file_and_flags_is_refused(flags, config_file):
    ds_config = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 8}
    message = refused(config_file(ds_config=ds_config), [*flags, "--accumulation_steps", "4"])
    assert "8" in message
    assert "--accumulation_steps gives 4" in message


def test_the_number_of_processes_counts_for_the_batch(flags, config_file):
    ds_config = {"zero_optimization": {"stage": 2}, "train_batch_size": 16}
    check_launch(config_file(ds_config=ds_config), "2", [*flags, "--batch_size", "8"])
    message = refused(config_file(ds_config=ds_config), [*flags, "--batch_size", "8"], "4")
    assert "16" in message
    assert "32" in message


def test_missing_data_is_refused(tmp_path):
    flags = [*TINY, "--data", str(tmp_path / "nothing")]
    assert str(tmp_path / "nothing") in refused(ZERO_2, flags, error=DataError)


def test_data_shorter_than_one_sequence_is_refused(flags):
    message = refused(ZERO_2, [*flags, "--max_seq_len", "100000"], error=DataError)
    assert "--max_seq_len" in message


def test_a_damaged_shard_is_refused(packed, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(packed, damaged)
    shard = next(damaged.glob("train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    message = refused(ZERO_2, [*TINY, "--data", str(damaged)], error=DataError)
    assert shard.name in message


def test_an_id_outside_the_vocabulary_is_refused(packed, tmp_path):
    foreign = tmp_path / "foreign"
    shutil.copytree(packed, foreign)
    shard = next(foreign.glob("train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2] + b"\xff\xff")
    message = refused(ZERO_2, [*TINY, "--data", str(foreign)], error=DataError)
    assert "65535" in message


@pytest.fixture
def weights(packed, tmp_path):
    """Weights of the shape that TINY asks for, with the tokenizer of the data."""
    config = LMConfig(dim=32, n_layers=1, n_heads=4, vocab_size=400, max_seq_len=16)
    save_portable(tmp_path / "weights", config, dict(Transformer(config).named_parameters()))
    shutil.copy(packed / TOKENIZER_FILE, tmp_path / "weights")
    return tmp_path / "weights"


def test_weights_to_start_from_pass(flags, weights):
    check_launch(ZERO_2, "2", [*flags, "--init_from", str(weights)])


def test_weights_to_start_from_that_are_missing_are_refused(flags, tmp_path):
    message = refused(ZERO_2, [*flags, "--init_from", str(tmp_path / "none")])
    assert message == f"{tmp_path / 'none'}: no such folder"


def test_weights_of_another_shape_than_the_flags_are_refused(flags, weights):
    message = refused(ZERO_2, [*flags, "--init_from", str(weights), "--n_layers", "3"])
    assert "--n_layers 3 (there 1)" in message


def test_weights_of_another_tokenizer_are_refused(flags, weights):
    (weights / TOKENIZER_FILE).write_bytes(b"another")
    message = refused(ZERO_2, [*flags, "--init_from", str(weights)], error=DataError)
    assert "prepare_data --tokenizer" in message


def test_damaged_weights_are_refused(flags, weights):
    file = weights / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-1])
    message = refused(ZERO_2, [*flags, "--init_from", str(weights)], error=ConfigError)
    assert message.startswith(f"{weights}: no readable weights")


@pytest.fixture(params=["old", "new"])
def run(request, flags, packed, tmp_path):
    """A run that one process saved with these flags, in both forms of a checkpoint."""
    args, shape = parse_arguments(flags)
    config = LMConfig(**shape, vocab_size=400)
    train_set = PackedDataset(packed, "train", config.max_seq_len)
    state = {"identity": run_identity(train_set, args, processes=1)}
    if request.param == "old":
        state["identity"] |= config.shape()
    else:
        state["model"] = config.to_dict()
    return make_run(tmp_path / "runs" / "saved", 10, **state)


def files(folder) -> list:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("resume", ["{run}", "auto"])
def test_a_run_that_can_be_resumed_passes_and_is_not_touched(flags, run, capsys, resume):
    before = files(run.parent)
    resumed = [*flags, "--out_dir", str(run.parent), "--resume", resume.format(run=run)]
    check_launch(ZERO_2, "1", resumed)
    assert files(run.parent) == before
    assert capsys.readouterr().out == ""


def test_a_run_to_resume_that_is_missing_is_refused(flags, tmp_path):
    missing = tmp_path / "none"
    message = refused(ZERO_2, [*flags, "--resume", str(missing)])
    assert message == f"--resume {missing}: neither a run with checkpoints nor a checkpoint"
    assert not missing.exists()


def test_a_damaged_checkpoint_is_refused(flags, run):
    state = RunFolder(run).checkpoint(10) / "state.json"
    state.write_text("{}", encoding="utf-8")
    assert "is damaged" in refused(ZERO_2, [*flags, "--resume", str(run)])


def test_a_name_that_another_run_has_is_refused(flags, run):
    taken = [*flags, "--out_dir", str(run.parent), "--run_name", run.name]
    assert "--resume auto" in refused(ZERO_2, taken)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (["--dim", "64"], "dim: 32 in the checkpoint, 64 now"),
        (["--seed", "7"], "seed: 42 in the checkpoint, 7 now"),
        (["--optimizer", "muon"], "optimizer: adamw in the checkpoint, muon now"),
        (["--accumulation_steps", "3"], "global_batch: "),
    ],
)
def test_a_run_that_differs_from_the_flags_is_refused(flags, run, changed, says):
    assert says in refused(ZERO_2, [*flags, "--resume", str(run), *changed])


def test_a_run_with_other_data_is_refused_with_both_names(flags, run, packed, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(packed, other)
    description = json.loads((other / "dataset.json").read_text(encoding="utf-8"))
    shard = description["splits"]["train"]["shards"][0]
    shard["sha256"] = shard["sha256"][::-1]
    (other / "dataset.json").write_text(json.dumps(description), encoding="utf-8")
    RunFolder(run).settings.write_text(json.dumps({"arguments": {"data": str(packed)}}))
    message = refused(ZERO_2, [*TINY, "--data", str(other), "--resume", str(run)])
    assert f"data: {packed} in the run, {other} now; --data {packed} goes on with it" in message


def test_another_number_of_processes_resumes_where_it_can_make_the_global_batch(flags, run):
    resumed = [*flags, "--resume", str(run), "--batch_size"]
    check_launch(ZERO_2, "2", [*resumed, "2"])
    assert "cannot be made of --batch_size 5" in refused(ZERO_2, [*resumed, "5"], "2")


RECIPE = LMConfig(dim=1024, n_layers=32, max_seq_len=1024)
ZERO = read_config("ds_config.json")


def needed(sequences: int) -> int:
    """Bytes of a micro-batch under ZeRO-2 with four processes."""
    values = {"dtype": "bfloat16", "processes": 4, "accumulation_steps": 768 // sequences}
    work = Workload(RECIPE, Parameters.of(RECIPE), batch_size=sequences, **values)
    return needs(kind_of(ZERO), work)


@pytest.fixture
def gpus(monkeypatch):
    """GPUs with so many bytes free."""

    def have(*free: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(workload, "attention_kernel", lambda *shape: ("flash", False))
        monkeypatch.setattr(
            preflight, "available_memory", lambda device, processes: free[device.index]
        )

    return have


@pytest.mark.parametrize(
    ("least", "batch_size"),
    [(needed(32), 32), (needed(32) - 1, 24), (needed(6) + 1, 6), (needed(1), 1), (0, 1)],
)
def test_the_largest_micro_batch_that_fits_keeps_the_batch(flags, gpus, capsys, least, batch_size):
    gpus(least + GIB, least, least + GIB, 0)  # the last one is not used
    recipe = parse_arguments(["--data", flags[-1]])[0]
    args = preflight.fit_micro_batch(recipe, 768, RECIPE, ZERO, processes=3)
    assert capsys.readouterr().out.count("\n") == 1
    assert args.batch_size * args.accumulation_steps == 768
    assert args.batch_size <= batch_size  # three processes share what four would
    gpus(*[least] * 4)
    args = preflight.fit_micro_batch(recipe, 768, RECIPE, ZERO, processes=4)
    assert (args.batch_size, args.accumulation_steps) == (batch_size, 768 // batch_size)


def test_a_launch_is_checked_with_the_micro_batch_that_fits(flags, gpus, config_file):
    gpus(10 * GIB)
    args = check_launch(ZERO_2, "1", flags, sequences=768)
    assert (args.batch_size, args.accumulation_steps) == (768, 1)
    ds_config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8}
    with pytest.raises(UsageError, match="--batch_size gives 768"):
        check_launch(config_file(ds_config=ds_config), "1", flags, sequences=768)


def test_a_run_that_goes_on_keeps_its_micro_batch_whatever_is_free_now(
    flags, gpus, packed, tmp_path, capsys
):
    gpus(10 * GIB)
    args, shape = parse_arguments([*flags, "--batch_size", "48", "--accumulation_steps", "16"])
    config = LMConfig(**shape, vocab_size=400)
    identity = run_identity(PackedDataset(packed, "train", config.max_seq_len), args, processes=1)
    saved = make_run(tmp_path / "saved", 10, identity=identity, model=config.to_dict())
    settings = json.dumps({"arguments": vars(args)}, default=str)
    RunFolder(saved).settings.write_text(settings, encoding="utf-8")
    resumed = check_launch(ZERO_2, "1", [*flags, "--resume", str(saved)], sequences=768)
    assert (resumed.batch_size, resumed.accumulation_steps) == (48, 16)
    assert "micro-batch: 48 of 768 sequences, 16 accumulation steps, as saved" in (
        capsys.readouterr().out
    )
    with pytest.raises(UsageError, match="global_batch: 768 in the checkpoint, 50 now"):
        check_launch(ZERO_2, "1", [*flags, "--resume", str(saved)], sequences=50)


def test_500_damaged_launcher_files_are_refused_in_words_or_pass(flags, tmp_path):
    dice, path = random.Random(0), tmp_path / "launch.yaml"
    messages = []
    for _ in range(500):
        data = bytearray((REPOSITORY / ZERO_2).read_bytes())
        for _ in range(dice.randint(1, 6)):
            at, kind = dice.randrange(len(data)), dice.random()
            if kind < 0.6:
                data[at] = dice.randrange(32, 127)
            elif kind < 0.8:
                del data[at : at + dice.randrange(1, 12)]
            else:
                data[at:at] = bytes(dice.randrange(32, 127) for _ in range(3))
        path.write_bytes(data)
        try:
            check_launch(str(path), "1", flags)
        except UsageError as error:
            messages.append(str(error))
    assert 200 < len(messages) < 500
    assert not any("\n" in message for message in messages)


def test_a_run_without_adapters_does_not_go_on_with_some(flags, run):
    resumed = [*flags, "--resume", str(run), "--lora_dim", "4"]
    with pytest.raises(UsageError, match=r"other adapters \(LoRA\): dim None there and 4 now"):
        check_launch(ZERO_2, "1", resumed, kind=SFTArguments)
