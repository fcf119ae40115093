import re
import shlex

import pytest
from conftest import REPOSITORY
from flag_table import flag_table

from common.errors import UsageError
from model import ConfigError, LMConfig
from training.arguments import (
    TrainingArguments,
    build_parser,
    flags_of,
    parse_arguments,
)
from training.initial_weights import MAY_DIFFER

README = REPOSITORY / "README.md"
FLAGS = [item for item, _ in [*flags_of(TrainingArguments), *flags_of(LMConfig)]]
INTS = [item.name for item in FLAGS if item.type in (int, int | None)]
FLOATS = [item.name for item in FLAGS if item.type is float]
BOOLS = [item.name for item in FLAGS if item.type is bool]
CHOICES = [item.name for item in FLAGS if item.metadata.get("choices")]
ZERO_ALLOWED = {
    "save_minutes",
    *("eval_interval", "eval_samples", "save_interval", "num_workers", "seed", "sample_tokens"),
    *("keep_last", "sample_interval"),
    *("warmup_steps", "weight_decay", "grad_clip", "min_lr_ratio", "decay_fraction"),
    *("beta1", "beta2", "muon_momentum", "dropout"),
}


def training_commands(text: str) -> list[list[str]]:
    """The flags of every command in a text that runs the training script."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(r"^    [^\"\n]*train_pretrain_accelerate\.py(.*)$", joined, re.MULTILINE)
    return [shlex.split(line.replace("...", ""), comments=True) for line in lines]


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ("--epochs 3", "epochs", 3),
        ("--batch_size 24", "batch_size", 24),
        ("--learning_rate 2e-4", "learning_rate", 2e-4),
        ("--dtype float16", "dtype", "float16"),
        ("--accumulation_steps 32", "accumulation_steps", 32),
        ("--grad_clip 1.0", "grad_clip", 1.0),
        ("--log_interval 100", "log_interval", 100),
        ("--save_interval 10000", "save_interval", 10000),
        ("--dim 1024", "dim", 1024),
        ("--n_layers 32", "n_layers", 32),
        ("--max_seq_len 1024", "max_seq_len", 1024),
        ("--use_flash_attn", "use_flash_attn", True),
        ("--profile", "profile", True),
        ("--profile_interval 10", "profile_interval", 10),
    ],
)
def test_the_flags_of_users_scripts_are_accepted(typed, name, value):
    args, model_settings = parse_arguments(typed.split())
    assert (vars(args) | model_settings)[name] == value
    assert name in {item.name for item in FLAGS}


def test_the_recipe_is_accepted_as_typed():
    recipe = (
        "--epochs 3 --batch_size 24 --learning_rate 2e-4 --dtype bfloat16 --accumulation_steps 32 "
        "--grad_clip 1.0 --log_interval 100 --save_interval 10000 --dim 1024 --n_layers 32 "
        "--max_seq_len 1024 --use_flash_attn --profile --profile_interval 10"
    )
    args, model_settings = parse_arguments(recipe.split())
    assert (args.epochs, args.batch_size, args.accumulation_steps) == (3, 24, 32)
    assert args.profile is True
    assert LMConfig(**model_settings).dim == 1024


def test_every_training_command_in_the_readme_parses():
    commands = training_commands(README.read_text(encoding="utf-8"))
    assert any("--profile_interval" in command for command in commands)
    for command in commands:
        parse_arguments(command)


def test_the_flags_that_the_shell_script_passes_parse():
    script = (REPOSITORY / "run_accelerate.sh").read_text(encoding="utf-8")
    blocks = re.findall(r"flags=\(\n(.*?)\n\s*\)", script, re.DOTALL)
    assert len(blocks) == 2
    shapes = re.findall(r"shape=\(([^)]*)\)", script)
    assert len(shapes) == 4  # of a student too
    for block in blocks:
        assert parse_arguments(shlex.split(block, comments=True))[1].keys() <= {*MAY_DIFFER}
    for shape in shapes:
        assert parse_arguments(shlex.split(shape))[1].keys().isdisjoint(MAY_DIFFER)


def refused(typed: list[str]) -> str:
    with pytest.raises((UsageError, ConfigError)) as error:
        parse_arguments(typed)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("value", ["x", "", "1.5", "nan", "inf", "1e3", "-1"])
@pytest.mark.parametrize("name", INTS)
def test_whole_numbers_refuse_anything_else(name, value):
    assert name in refused([f"--{name}={value}"])


@pytest.mark.parametrize("value", ["x", "", "nan", "inf", "-inf", "-1", "1,5"])
@pytest.mark.parametrize("name", FLOATS)
def test_numbers_refuse_what_is_no_number_or_not_finite_or_negative(name, value):
    assert name in refused([f"--{name}={value}"])


@pytest.mark.parametrize("name", sorted(set(INTS + FLOATS) - ZERO_ALLOWED))
def test_zero_is_refused_where_it_means_nothing(name):
    assert name in refused([f"--{name}=0"])


@pytest.mark.parametrize("name", sorted(ZERO_ALLOWED))
def test_zero_is_accepted_where_it_means_something(name):
    args, model_settings = parse_arguments([f"--{name}=0"])
    assert (vars(args) | model_settings)[name] == 0


@pytest.mark.parametrize("name", ["beta1", "beta2", "muon_momentum", "dropout"])
def test_one_is_refused_for_averages_and_dropout(name):
    assert name in refused([f"--{name}=1"])


@pytest.mark.parametrize("name", ["min_lr_ratio", "decay_fraction"])
def test_shares_end_at_one(name):
    parse_arguments([f"--{name}=1"])
    assert name in refused([f"--{name}=1.01"])


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_choice_is_refused_with_the_choices_named(name):
    message = refused([f"--{name}=nonsense"])
    assert name in message
    assert "nonsense" in message
    choices = next(item.metadata["choices"] for item in FLAGS if item.name == name)
    assert all(choice in message for choice in choices)


@pytest.mark.parametrize("name", BOOLS)
def test_a_switch_takes_no_value(name):
    assert name in refused([f"--{name}=yes"])


@pytest.mark.parametrize(
    "name",
    [item.name for item in FLAGS if item.type is not bool and not item.metadata.get("alone")],
)
def test_a_flag_without_its_value_is_refused(name):
    assert name in refused([f"--{name}"])


@pytest.mark.parametrize("value", ["", " ", "a/b", ".", "..", "/tmp/x", "é" * 128])
def test_a_run_name_is_a_plain_folder_name(value):
    assert "run_name" in refused([f"--run_name={value}"])


@pytest.mark.parametrize(
    ("flag", "value"),
    [("sample_prompt", "\ud83d"), ("deepspeed", "a\0")],
)
def test_what_no_tokenizer_or_system_takes_is_refused_before_training(flag, value):
    assert flag in refused([f"--{flag}={value}"])


@pytest.mark.parametrize("value", ["", "nonsense", "tensorboard,nonsense", "tensorboard;wandb"])
def test_unknown_trackers_are_refused(value):
    assert "log_with" in refused([f"--log_with={value}"])


@pytest.mark.parametrize(
    "typed",
    [
        "--deepspeed ds.json",
        "--deepspeed_config=ds.json",
        "--deepspeed_config ds.json --deepspeed",
        "--deepspeed --deepspeed_config ds.json",  # as DeepSpeed's own programs have it
        "--local_rank=1 --deepspeed ds.json",
        "--deepspeed ds.json --local-rank 1",
    ],
)
def test_deepspeeds_flags_are_taken_as_its_users_type_them(typed):
    args, _ = parse_arguments(typed.split())
    assert args == TrainingArguments(deepspeed="ds.json")


@pytest.mark.parametrize("typed", ["--deepspeed", "--deepspeed --dim 64", "--deepspeed="])
def test_deepspeed_without_a_file_is_refused(typed):
    assert "--deepspeed must be the name of a file" in refused(typed.split())


def test_several_trackers_are_separated_by_commas():
    args, _ = parse_arguments(["--log_with", "tensorboard, wandb"])
    assert args.trackers == ["tensorboard", "wandb"]


@pytest.mark.parametrize(
    "typed", ["--nonsense 1", "--batch 8", "--learning 1e-3", "--use_flash", "--vocab_size 9", "x"]
)
def test_unknown_and_abbreviated_flags_are_refused_by_name(typed):
    assert typed.split()[0] in refused(typed.split())


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("--dim 100 --n_heads 8", ("dim 100", "n_heads 8")),
        ("--n_heads 8 --n_kv_heads 3", ("n_heads 8", "n_kv_heads 3")),
        ("--dim 24 --n_heads 8", ("3",)),
    ],
)
def test_shapes_that_cannot_be_built_are_refused_with_their_numbers(typed, named):
    message = refused(typed.split())
    assert all(part in message for part in named)


@pytest.mark.parametrize("name", BOOLS)
def test_of_a_switch_given_twice_the_last_one_wins(name):
    off = parse_arguments([f"--{name}", f"--no-{name}"])
    on = parse_arguments([f"--no-{name}", f"--{name}"])
    assert (vars(off[0]) | off[1])[name] is False
    assert (vars(on[0]) | on[1])[name] is True


def test_of_a_flag_given_twice_the_last_one_wins():
    assert parse_arguments(["--batch_size", "4", "--batch_size", "16"])[0].batch_size == 16


def test_settings_of_the_model_come_back_only_if_they_were_typed():
    typed = ["--dim", "512", "--no-tie_embeddings"]
    assert parse_arguments(typed)[1] == {"dim": 512, "tie_embeddings": False}


def test_with_weights_to_start_from_the_shape_is_checked_when_theirs_is_known():
    parse_arguments(["--init_from", "weights", "--n_heads", "3"])
    assert "n_heads 3" in refused(["--n_heads", "3"])


def test_defaults_are_those_of_the_dataclasses():
    args, model_settings = parse_arguments([])
    assert args == TrainingArguments()
    assert LMConfig(**model_settings) == LMConfig()


def test_the_vocabulary_comes_with_the_data_and_is_no_flag():
    assert "vocab_size" not in parse_arguments([])[1]


def test_help_explains_every_flag_and_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for item in FLAGS:
        assert f"--{item.name}" in shown
        assert item.metadata["help"] in shown
    assert "(default: 0.0005)" in shown


def test_every_flag_has_a_help_text():
    assert all(item.metadata["help"] for item in FLAGS)
    assert build_parser().allow_abbrev is False


def test_the_table_in_the_readme_is_the_one_made_from_the_fields():
    text = README.read_text(encoding="utf-8")
    shown = re.search(r"<!-- flags -->\n(.*?)\n<!-- /flags -->", text, re.DOTALL)
    assert shown is not None, "README.md has no <!-- flags --> ... <!-- /flags --> section"
    assert shown[1].strip() == flag_table()
