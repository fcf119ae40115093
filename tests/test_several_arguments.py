"""Models in files: their flags are those of pretraining, and what all share is one."""

import json

import pytest

from common.errors import UsageError
from model import ConfigError
from training.several_arguments import OWN, parse_models


@pytest.fixture
def model(tmp_path):
    """Writes a model's file; returns its path."""

    def write(name: str, flags: dict | str) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(flags if isinstance(flags, str) else json.dumps(flags), encoding="utf-8")
        return str(path)

    return write


def parse(files: list[str], *flags: str):
    return parse_models([*(word for file in files for word in ("--model", file)), *flags])


def test_a_file_holds_flags_by_name_and_flags_on_the_command_line_hold_for_all(model):
    small = model("small", {"dim": 64, "learning_rate": 1e-3, "tie_embeddings": False})
    large = model("large", {"run_name": "big", "deepspeed": "configs/zero3.json"})
    flags = ("--batch_size", "3", "--n_layers", "2")
    (first, shape), (second, other) = parse([small, large], *flags)
    assert (first.run_name, first.learning_rate, first.batch_size) == ("small", 1e-3, 3)
    assert shape == {"dim": 64, "tie_embeddings": False, "n_layers": 2}
    assert (second.run_name, second.deepspeed) == ("big", "configs/zero3.json")
    assert second.batch_size == 3
    assert other == {"n_layers": 2}


def test_values_may_be_numbers_words_or_switches_as_on_a_command_line(model):
    flags = {"dim": "64", "use_flash_attn": True, "sample_prompt": "--a = b", "compile": "off"}
    ((args, shape),) = parse([model("one", flags)])
    assert (args.sample_prompt, args.compile) == ("--a = b", "off")
    assert shape == {"dim": 64, "use_flash_attn": True}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lr": 1e-3}, "one.json: unrecognized argument --lr=0.001: did you mean --learning_rate?"),
        ({"dimm": 64}, "one.json: unrecognized argument --dimm=64: did you mean --dim?"),
        ({"model": "x.json"}, "one.json: unrecognized argument --model=x.json"),
        ({"help": True}, "one.json: argument -h/--help: ignored explicit argument 'True'"),
        ({"dim": 64.5}, "one.json: argument --dim: invalid int value: '64.5'"),
        ({"dim": True}, "one.json: argument --dim: invalid int value: 'True'"),
        ({"dim": [64, 128]}, '"dim" must be one value, not [64, 128]'),
        ({"dropout": None}, 'one.json: "dropout" must be one value, not null'),
        ({"learnign_rate": None}, 'one.json: "learnign_rate" must be one value, not null'),
        ({"tf32": "yes"}, "one.json: argument --tf32/--no-tf32: ignored explicit argument 'yes'"),
        ({"learning_rate": -1}, "one.json: --learning_rate must be positive and finite, not -1.0"),
        ({"optimizer": "sgd"}, "one.json: argument --optimizer: invalid choice: 'sgd'"),
        ({"run_name": "a/b"}, "one.json: --run_name must be a plain folder name, not 'a/b'"),
        ({"run_name": "a\0b"}, r"one.json: --run_name must be a plain folder name, not 'a\x00b'"),
        ({"dim": 30, "n_heads": 4}, "one.json: "),
        ("{", "one.json: not JSON: "),
        ('{"dim": 32, "n_heads": 4, "dim": 64}', 'one.json: not JSON: "dim" stands there twice'),
        ({"local_rank": 0}, 'one.json: "local_rank" is what a launcher says'),
        ("\xff\xfe", "one.json: not JSON: "),
        ("[1]", "one.json: needs flags and their values in braces"),
        ("[" * 100_000, "one.json: not JSON: "),
    ],
)
def test_what_cannot_be_a_model_is_said_with_its_file(model, flags, message):
    with pytest.raises((UsageError, ConfigError)) as error:
        parse([model("one", flags)])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_not_there_and_no_file_at_all(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match=rf"^--model {path}: (No such|Is a directory)"):
            parse([str(path)])
    with pytest.raises(UsageError, match="required: --model"):
        parse_models([])


def test_models_may_differ_in_what_is_their_own(model):
    values = {"optimizer": "muon", "compile": "off", "lr_schedule": "wsd", "init_from": "x"}
    values |= {"gradient_checkpointing": "blocks", "deepspeed": "ds_config.json"}
    values |= {"warmup_steps": 3, "max_bad_steps": 7, "sample_tokens": 9, "sample_prompt": "A"}
    own = {name: values.get(name, 0.5) for name in OWN - {"run_name"}}
    (one, _), (other, _) = parse([model("one", {}), model("other", own)])
    assert all(getattr(other, name) == value for name, value in own.items())
    assert all(getattr(one, name) != value for name, value in own.items())


@pytest.mark.parametrize(
    ("one", "other", "flags", "message"),
    [
        ({}, {"batch_size": 4}, (), "--batch_size must be the same .* 8 in .*one.* 4 in .*other"),
        ({"seed": 1}, {"seed": 2}, (), "--seed must be the same .* 1 in .*one.* 2 in .*other"),
        ({"max_seq_len": 64}, {}, (), "--max_seq_len .* 64 in .*one.* 512 in .*other"),
        ({"dtype": "float32"}, {}, (), "--dtype .* 'float32' in .*one.* 'bfloat16' in .*other"),
        ({}, {"run_name": "one"}, (), "one.json and .*other.json both have the run_name 'one'"),
        ({"dim": 64}, {}, ("--dim", "32"), 'one.json: "dim" is 64 there, and --dim 32 holds for'),
        ({}, {}, ("--run_name", "a"), '--run_name: each model has one of its own, "run_name" in'),
        ({}, {}, ("--resume", "out/runs/a"), "--resume out/runs/a: several models take .*auto"),
        ({}, {}, ("--log_with", "none,wandb"), "--log_with wandb: it takes one run per process"),
    ],
)
def test_what_cannot_be_trained_together_is_refused(model, one, other, flags, message):
    with pytest.raises(UsageError, match=message) as error:
        parse([model("one", one), model("other", other)], *flags)
    assert "\n" not in str(error.value)


def test_what_is_shared_may_stand_in_every_file_or_there_and_on_the_command_line(model):
    files = [model("one", {"batch_size": 4}), model("other", {"batch_size": 4})]
    assert [args.batch_size for args, _ in parse(files)] == [4, 4]
    assert [args.batch_size for args, _ in parse(files, "--batch_size", "4")] == [4, 4]


def test_the_context_of_weights_is_known_later(model):
    files = [model("one", {"max_seq_len": 64}), model("other", {"init_from": "out/imported/x"})]
    assert len(parse(files)) == 2


def test_help_tells_of_files_and_of_all_flags(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_models(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "python train_several_accelerate.py" in said
    assert "--model FILE" in said
    assert "--learning_rate" in said
