"""`find_inputs` finds shape, data and weights of a run by flags like --init_from and --teacher."""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, error_of, pack
from small_model import save_model
from test_arguments import parse_arguments
from test_conversation_set import conversation, make_set
from test_resume_choice import write_empty

from lm.common.errors import ReportedError, UsageError
from lm.data.tokenizer import TOKENIZER_FILE
from lm.formats.portable import save_portable
from lm.storage.folder import RunFolder
from lm.training.arguments import DistillationArguments, SFTArguments
from lm.training.inputs import Inputs, find_inputs
from model import ConfigError, LMConfig, Transformer

# No value here is LMConfig's default.
CONFIG = LMConfig(
    dim=48,
    n_layers=1,
    n_heads=6,
    n_kv_heads=3,
    vocab_size=400,
    hidden_dim=80,
    multiple_of=16,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_seq_len=24,
    dropout=0.2,
    tie_embeddings=False,
    use_flash_attn=False,
)


@pytest.fixture
def weights(packed, tmp_path) -> Path:
    """Portable weights with the tokenizer of the packed data."""
    torch.manual_seed(0)
    return save_model(tmp_path / "weights", Transformer(CONFIG), packed)


def set_vocab_size(weights: Path, vocab_size: int) -> None:
    """Write a config with this vocabulary size, and a weights file without tensors."""
    save_portable(weights, LMConfig(**CONFIG.to_dict() | {"vocab_size": vocab_size}), {})


def inputs(typed: str, packed: Path, weights: Path | None = None) -> Inputs:
    words = [*typed.split(), "--data", str(packed), "--out_dir", str(packed / "runs")]
    words += ["--init_from", str(weights)] if weights else []
    return find_inputs(*parse_arguments(words), None)


def config(typed: str, weights: Path, packed: Path) -> LMConfig:
    return inputs(typed, packed, weights).config


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--output_lr_factor 2", "^--output_lr_factor has no effect on a tied matrix"),
        ("--use_moe --moe_hidden_dim 100", "^experts in bfloat16 need sizes that 8 divides"),
    ],
)
def test_a_flag_that_does_not_suit_the_model_is_refused(packed, flags, says):
    words = f"--data {packed} --out_dir {packed}/runs --dim 64 {flags}"
    with pytest.raises(UsageError, match=says):
        find_inputs(*parse_arguments(words.split()), None)
    remedy = " --no-tie_embeddings" if "lr" in flags else " --dtype float32"
    assert find_inputs(*parse_arguments((words + remedy).split()), None).config.dim == 64


def test_init_from_takes_the_shape_of_weights_but_not_dropout_and_attention(weights, packed):
    found = config("", weights, packed)
    assert found.to_dict() == CONFIG.to_dict() | {"dropout": 0.0, "use_flash_attn": True}
    typed = "--dim 48 --n_layers 1 --n_heads 6 --n_kv_heads 3 --no-tie_embeddings --norm_eps 1e-6"
    assert config(typed, weights, packed) == found
    changed = config("--dropout 0.1 --no-use_flash_attn --max_seq_len 64", weights, packed)
    assert (changed.dropout, changed.use_flash_attn, changed.max_seq_len) == (0.1, False, 64)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--n_heads 8", "--n_heads 8: leave it out, .* has 6$"),  # 8 would not fit n_kv_heads 3
        ("--tie_embeddings", "--tie_embeddings True: .* has False$"),
        ("--rope_theta 1e6", "--rope_theta 1000000.0: .* has 10000.0$"),
        ("--n_kv_heads 2", "--n_kv_heads 2: .* has 3$"),  # a default that is typed counts
        ("--max_seq_len 0", "max_seq_len"),
        ("--dropout 1", "dropout"),
    ],
)
def test_a_flag_that_is_invalid_or_contradicts_the_weights_is_refused(typed, says, weights, packed):
    with pytest.raises((UsageError, ConfigError), match=says):
        config(typed, weights, packed)


def test_a_model_may_have_more_ids_than_its_tokenizer_but_not_fewer(weights, packed):
    set_vocab_size(weights, 416)
    assert config("", weights, packed).vocab_size == 416
    set_vocab_size(weights, 300)
    assert "400, has another tokenizer than the model" in error_of(config, "", weights, packed)
    (weights / TOKENIZER_FILE).unlink()  # without it, the vocabulary sizes must be equal
    set_vocab_size(weights, 416)
    assert ", vocabulary 416: prepare the text anew" in error_of(config, "", weights, packed)
    set_vocab_size(weights, 400)
    assert config("", weights, packed).vocab_size == 400


def test_an_epoch_is_one_pass_over_a_text_in_several_segmentations(corpus, packed, tmp_path):
    data = pack(corpus, tmp_path / "data", segmentations=3)
    typed = "--epochs 2 --max_seq_len 24 --run_name a"
    found = inputs(typed, data)
    passed = math.ceil(len(found.train_set) / 3)
    assert (found.train_set.samples_per_epoch, found.total_steps) == (
        passed,
        math.ceil(2 * passed / 8),
    )
    write_empty(
        RunFolder(data / "runs" / "a"), 1, identity=found.identity, model=found.config.to_dict()
    )
    again = inputs(f"{typed} --resume auto", data)
    assert again.start.checkpoint
    assert (again.identity, again.total_steps) == (found.identity, found.total_steps)
    # Only such a text can be read with noise.
    assert inputs("--token_noise 0.1", data).args.token_noise == 0.1
    assert "--token_noise 0.1 needs a text in several" in error_of(
        inputs, "--token_noise 0.1", packed
    )


@pytest.fixture
def chat(tmp_path, packed) -> SFTArguments:
    """Fine-tuning of new weights. All conversations of the validation split are too long."""
    folder = make_set(tmp_path / "c", [conversation(2, 5)], val=[conversation(30, 33)])
    shutil.copy(packed / TOKENIZER_FILE, folder)
    description = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(description | {"tokenizer_sha256": "0" * 64}))
    return SFTArguments(data=str(folder), init_from=None, out_dir=str(tmp_path / "runs"))


def test_a_validation_split_without_a_fitting_row_gives_no_validation_set(chat):
    found = find_inputs(chat, {"max_seq_len": 8}, None)
    assert (len(found.train_set), found.val_set, found.total_steps) == (1, None, 1)


@pytest.fixture
def runs(packed, tmp_path) -> Path:
    """A folder of two pretraining runs. The older run has sequences of 16 tokens. The newer run has
    sequences of 24 tokens, and its data are gone."""
    for age, (name, length, data) in enumerate((("newer", 24, "gone"), ("older", 16, packed))):
        run = RunFolder(tmp_path / "elsewhere" / name)
        config = LMConfig(**CONFIG.to_dict() | {"max_seq_len": length})
        torch.manual_seed(0)
        save_model(run.weights, Transformer(config), packed)
        run.settings.write_text(json.dumps({"started": -age, "arguments": {"data": str(data)}}))
    return tmp_path / "elsewhere"


def student(runs: Path, *typed: str) -> Inputs:
    words = ["--out_dir", str(runs), *typed]
    return find_inputs(*parse_arguments(words, DistillationArguments), None)


def test_auto_looks_where_runs_are_written(runs, packed):
    assert student(runs, "--data", str(packed)).teacher.source.path == runs / "newer" / "weights"
    args, settings = parse_arguments(["--data", str(packed), "--out_dir", str(runs)])
    found = find_inputs(replace(args, init_from="auto"), settings, None)
    assert found.source.path == runs / "newer" / "weights"
    assert f" in {runs / 'none'} yet" in error_of(student, runs / "none")


def test_a_student_takes_data_and_length_of_its_teacher_and_may_not_exceed_the_length(runs, packed):
    found = student(runs, "--teacher", str(runs / "older"))
    assert (found.args.data, found.config.max_seq_len) == (str(packed), 16)
    assert "the training data of " in error_of(student, runs)
    assert student(runs, "--data", str(packed)).config.max_seq_len == 24
    said = error_of(student, runs, "--data", str(packed), "--max_seq_len", "32")
    assert "reads at most 24 tokens, but the student 32" in said


def test_sampling_is_refused_with_a_teacher_or_adapters_of_the_output_layer(runs, packed, chat):
    assert inputs("--sampled_softmax 8", packed).args.sampled_softmax == 8
    said = (
        "has no meaning with a teacher, adapters of the output layer or fewer than 999,999 pieces"
    )
    assert said in error_of(inputs, "--sampled_softmax 999999", packed)
    assert "8 has no" in error_of(student, runs, "--data", str(packed), "--sampled_softmax", "8")
    chat = replace(chat, lora_dim=2, sampled_softmax=8)
    settings = {"max_seq_len": 8, "tie_embeddings": False}
    assert find_inputs(chat, settings, None).shapes.lora.module_name == "layers"
    chat = replace(chat, lora_module_name="output")
    assert "adapters of the output layer" in error_of(find_inputs, chat, settings, None)


def test_conversations_prepared_by_other_flags_are_used(weights, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": f"{i} + 1", "response": str(i + 1)}) for i in range(40)]
    Path("chat.jsonl").write_text("\n".join([*rows, "{"]), encoding="utf-8")
    words = ["--conversations", "chat.jsonl", "--init_from", str(weights)]
    with pytest.raises(ReportedError):
        find_inputs(*parse_arguments(words, SFTArguments), None)
    said = capfd.readouterr()
    assert "line 41: not JSON" in said.err
    (command,) = [x for x in said.err.splitlines() if x.startswith("try: python -m")]
    typed = [*shlex.split(command)[4:], "--skip_bad_lines"]
    search = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "scripts.prepare_data", *typed]
    subprocess.run(command, env=search, check=True)
    assert len(find_inputs(*parse_arguments(words, SFTArguments), None).train_set) > 20
