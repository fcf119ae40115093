from dataclasses import replace
from pathlib import Path

import pytest
from conftest import error_of

from lm.common.errors import UsageError
from lm.storage.folder import RunFolder
from lm.training.arguments import (
    SFTArguments,
    TrainingArguments,
    as_arguments,
    build_parser,
    flags_of,
)
from lm.training.inputs import prepared_data
from lm.training.starting_point import StartingPoint
from model import ConfigError, LMConfig

FLAGS = [item for item, _ in [*flags_of(TrainingArguments), *flags_of(LMConfig)]]
NUMBERS = {x.name: x.type for x in FLAGS if x.type in (int, int | None, float, float | None)}
CHOICES = [item.name for item in FLAGS if item.metadata.get("choices")]
ZERO_ALLOWED = {
    *("save_minutes", "keep_last", "sample_interval", "warmup_steps", "weight_decay", "grad_clip"),
    *("eval_interval", "eval_samples", "save_interval", "num_workers", "seed", "sample_tokens"),
    *("min_lr_ratio", "decay_fraction", "beta1", "beta2", "muon_momentum", "dropout"),
    *("warmup_fraction", "token_noise"),
    *("n_shared_experts", "router_aux_loss"),
}


def parse_arguments(
    words: list[str], arguments: type[TrainingArguments] = TrainingArguments
) -> tuple[TrainingArguments, dict]:
    """Return the training arguments and the model settings of a command that starts a new run."""
    return as_arguments(vars(build_parser(arguments).parse_args(words)), arguments)


def parsed(*typed: str) -> dict:
    args, model_settings = parse_arguments([*typed])
    return vars(args) | model_settings


def refused(*typed: str) -> str:
    made = lambda: LMConfig(**parse_arguments([*typed])[1])  # noqa: E731
    return error_of(made, error=(UsageError, ConfigError))


def test_the_flags_of_users_scripts_are_accepted():
    recipe = (
        "--epochs 3 --batch_size 24 --learning_rate 2e-4 --dtype float16 --accumulation_steps 32 "
        "--grad_clip 1.0 --log_interval 100 --save_interval 10000 --dim 1024 --n_layers 32 "
        "--max_seq_len 1024 --profile_interval 10"
    )
    words = recipe.split()
    found = parsed(*words, "--use_flash_attn", "--profile")
    assert found["use_flash_attn"] is found["profile"] is True
    for name, typed in zip(words[::2], words[1::2], strict=True):
        value = found[name.removeprefix("--")]
        assert value == type(value)(typed)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_wrong_number_is_refused_in_a_message_that_names_its_flag(name):
    wrong = ["x", "", "nan", "inf", "-inf", "-1"]
    wrong += [] if NUMBERS[name] in (float, float | None) else ["1.5", "1e3"]
    for value in wrong:
        assert name in refused(f"--{name}={value}")
    if name in ZERO_ALLOWED:
        assert parsed(f"--{name}=0")[name] == 0
    else:
        assert name in refused(f"--{name}=0")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        *(
            (f"--{name}=1", name)
            for name in ("beta1", "beta2", "muon_momentum", "dropout", "token_noise")
        ),
        *((f"--{name}=1.01", name) for name in ("min_lr_ratio", "decay_fraction")),
        *((f"--{name}=nonsense", name) for name in CHOICES),
        ("--profile=yes", "profile"),
        *((f"--run_name={name}", "run_name") for name in ("", "a/b", "..")),
        ("--batch_size", "batch_size"),
        ("--sample_prompt=\ud83d", "sample_prompt"),
        ("--deepspeed=a\0", "deepspeed"),
        ("--deepspeed", "--deepspeed must be followed by a file, as in --deepspeed ds_"),
        ("--log_with=tensorboard,nonsense", "log_with"),
        ("--nonsense 1", "unrecognized arguments: --nonsense 1 (see --help)"),
        ("--batch 8", "--batch"),  # a flag cannot be abbreviated
        ("--vocab_size 9", "--vocab_size"),  # the data decide the vocabulary
    ],
)
def test_a_wrong_flag_is_refused_in_one_line_that_names_it(typed, says):
    assert says in refused(*typed.split(" "))


@pytest.mark.parametrize(
    "typed",
    [
        "--deepspeed_config=ds.json --local_rank=1",  # DeepSpeed's launcher adds --local_rank
        "--deepspeed --deepspeed_config ds.json",  # as in DeepSpeed's own programs
        "--deepspeed ds.json --local-rank=1",  # torch.distributed.launch adds this flag
    ],
)
def test_the_flags_of_deepspeed_and_of_launchers_are_accepted(typed):
    args, _ = parse_arguments(typed.split())
    assert args == replace(parse_arguments([])[0], deepspeed="ds.json")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"only_optimize_lora": True}, "--only_optimize_lora needs adapters: pass --lora_dim"),
        ({"lora_alpha": 8.0}, "--lora_alpha needs adapters"),
        ({"lora_module_name": "wq"}, "--lora_module_name needs adapters"),
        ({"lora_dim": 8, "lora_alpha": -1.0}, "--lora_alpha must be positive"),
        ({"data": "out/data/chat", "conversations": "my.jsonl"}, "give one"),
    ],
)
def test_fine_tuning_flags_that_are_wrong_or_contradict_each_other_are_refused(flags, says):
    start = StartingPoint(RunFolder(Path("out/runs/new")))
    assert says in error_of(lambda: prepared_data(SFTArguments(**flags), start, None, None))


@pytest.mark.parametrize(
    ("flag", "n"), [("epochs 3", 38), ("epochs 4", 50), ("max_steps 5", 5), ("max_steps 99", 99)]
)
def test_the_steps_of_the_epochs_are_rounded_up_and_max_steps_replaces_them(flag, n):
    args, _ = parse_arguments(f"--{flag} --batch_size 2 --accumulation_steps 2".split())
    assert args.total_steps(n_samples=100, processes=2) == n


def test_the_precision_of_matrix_products_is_that_of_dtype_or_tf32():
    dtypes = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    found = {dtype: TrainingArguments(dtype=dtype).matrix_precision for dtype in dtypes}
    assert found == dtypes
    assert TrainingArguments(dtype="float32", tf32=True).matrix_precision == "tf32"
