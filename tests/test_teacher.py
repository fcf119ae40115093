import shutil
from pathlib import Path

import pytest
import torch
from conftest import error_of
from small_model import opinionated, save_model
from test_import_weights import write_theirs

from lm.data.dataset import PackedDataset
from lm.formats.import_weights import import_weights
from lm.storage.weights import WeightsFolder
from lm.training.arguments import DistillationArguments
from lm.training.distillation import TeacherWeights

SEQ_LEN = 32
TOKENS = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher") / "run", opinionated(400, SEQ_LEN), packed)


@pytest.fixture(scope="module")
def data(packed) -> PackedDataset:
    return PackedDataset(packed, "train", SEQ_LEN)


def find(teacher: Path | str, **flags) -> TeacherWeights:
    return TeacherWeights.find(DistillationArguments(teacher=str(teacher), **flags))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_has_its_weights_in_the_training_precision(weights, engine, dtype):
    teacher = find(weights).load(engine, dtype)
    expected = opinionated(400, SEQ_LEN).to(getattr(torch, dtype))
    assert len([*teacher.parameters()]) == len([*expected.parameters()])  # tied weights count once
    assert {p.dtype for p in teacher.parameters()} == {getattr(torch, dtype)}
    assert not any(p.requires_grad for p in teacher.parameters())
    assert torch.equal(teacher(TOKENS).logits, expected(TOKENS).logits)


def test_a_hugging_face_llama_teaches_without_an_import_but_with_the_same_weights(engine, tmp_path):
    llama = write_theirs(tmp_path / "llama")
    found = find(llama)
    import_weights(llama, tmp_path / "imported")
    imported = WeightsFolder.find(str(tmp_path / "imported"))
    assert imported.sha256() == found.source.sha256()
    teacher = found.load(engine, "float32")
    assert torch.equal(teacher(TOKENS).logits, imported.load()(TOKENS).logits)


def test_weights_are_hashed_anew_only_if_their_files_changed(packed, tmp_path, monkeypatch):
    folder = save_model(tmp_path / "first", opinionated(400, SEQ_LEN), packed)
    digest = WeightsFolder.find(str(folder)).sha256()
    with monkeypatch.context() as replaced:
        replaced.setattr(WeightsFolder, "tensors", None)
        assert WeightsFolder.find(str(folder)).sha256() == digest
    other = opinionated(400, SEQ_LEN)
    other.norm.weight.data *= 2
    save_model(folder, other, packed)
    assert WeightsFolder.find(str(folder)).sha256() != digest


def test_a_teacher_that_does_not_fit_a_student_is_refused(weights, data, engine, packed, tmp_path):
    def refused(folder: Path, data: PackedDataset, **flags) -> str:
        return error_of(find(folder, **flags).require_fit, data, engine)

    find(weights).require_fit(data, engine)
    # Many models round their vocabulary size up, so it is larger than the tokenizer's.
    roomy = save_model(tmp_path / "roomy", opinionated(448, SEQ_LEN), packed)
    find(roomy).require_fit(data, engine)
    longer = PackedDataset(packed, "train", 64)
    said = refused(weights, longer)
    assert "reads at most 32 tokens, but the student 64: pass --max_seq_len 32" in said
    other = PackedDataset(data.folder, "train", SEQ_LEN)
    other.description = data.description | {"tokenizer_sha256": "0" * 64}
    said = refused(weights, other)
    assert f"{data.folder}, vocabulary 400, has another tokenizer than the model in" in said
    assert f"--tokenizer {weights / 'tokenizer.model'}" in said
    no_tokenizer = save_model(tmp_path / "no_tokenizer", opinionated(400, SEQ_LEN), packed)
    (no_tokenizer / "tokenizer.model").unlink()
    assert "has no tokenizer to compare" in refused(no_tokenizer, data)
    divided = {"teacher_config": "configs/zero3_inference.json"}
    config = find(weights, **divided).zero
    assert config["bf16"] == {"enabled": True}
    assert config["zero_optimization"]["memory_efficient_linear"] is False
    assert "--teacher_config needs a launcher" in refused(weights, data, **divided)
    find(weights, **divided).require_fit(data, engine=None)  # as before a launch


def test_weights_that_cannot_teach_and_a_teacher_config_of_stage_2_are_refused(weights, tmp_path):
    foreign = Path(shutil.copytree(weights, tmp_path / "foreign"))
    (foreign / "config.json").write_text('{"model_type": "gpt2"}')
    assert "foreign: model_type is 'gpt2', only" in error_of(find, foreign)
    said = error_of(find, weights, teacher_config="ds_config.json")
    assert "divided by ZeRO stage 3, not 2" in said
