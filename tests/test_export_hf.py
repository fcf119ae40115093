"""Folders that scripts.export_hf writes, opened by transformers."""

import json
import random
import shutil
from pathlib import Path

import jinja2
import pytest
import torch
from conftest import VOCAB_SIZE
from safetensors.torch import load_file
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from small_model import save_model
from test_tokenizer import NASTY
from test_transformer import transformer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm.data.chat_template import PLAIN_JINJA, TEMPLATE_FILE
from lm.data.conversations import Turn, encode_conversation
from lm.data.tokenizer import Tokenizer
from lm.formats.portable import load_portable, save_portable
from lm.storage.weights import load_trained
from scripts import export_hf, import_weights

SHAPE = {"dim": 48, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "max_seq_len": 40}


def write_weights(folder: Path, packed: Path, **changes) -> Path:
    """Write portable weights and the tokenizer. The weights are scaled so that logits vary."""
    model = transformer(vocab_size=VOCAB_SIZE, hidden_dim=None, **SHAPE | changes)
    return save_model(folder, model, packed)


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "w", packed)


@pytest.fixture(scope="module")
def exported(weights, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "deep" / "hf"
    export_hf.main([str(weights), str(out)])
    return out


def some_tokens(length=40) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(1))


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return loaded(some_tokens()).logits


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("float32", {"tie_embeddings": True, "n_kv_heads": 1, "rope_theta": 1e4}),
        ("bfloat16", {"tie_embeddings": True}),
        ("float16", {"tie_embeddings": False}),
        ("float32", {"tie_embeddings": True, "use_moe": True, "moe_hidden_dim": 24}),
    ],
)
def test_transformers_computes_equal_logits(packed, tmp_path, dtype, changes):
    weights, kind = write_weights(tmp_path / "w", packed, **changes), getattr(torch, dtype)
    export_hf.main([str(weights), str(tmp_path / "hf"), "--dtype", dtype])
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {kind}
    assert ("lm_head.weight" in stored) != changes["tie_embeddings"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == kind
    model = load_portable(weights)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(kind).float()
    with torch.no_grad():
        ours = model(some_tokens()).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(logits_of(tmp_path / "hf"), ours, atol=1e-5, rtol=0)


def test_a_weight_too_large_for_the_dtype_is_refused_and_leaves_nothing(packed, tmp_path, refusal):
    weights = write_weights(tmp_path / "w", packed)
    model = load_portable(weights)
    model.layers[0].attention.wq.weight.data[0, 0] = 1e5
    save_portable(weights, model.config, dict(model.named_parameters()))
    line = refusal(export_hf, weights, tmp_path / "hf", "--dtype", "float16")
    assert "layers.0.attention.wq.weight does not fit into float16" in line
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_the_exported_settings_are_those_that_transformers_reads(exported):
    config = AutoModelForCausalLM.from_pretrained(exported).config
    assert config.max_position_embeddings == SHAPE["max_seq_len"]
    assert (config.bos_token_id, config.eos_token_id, config.head_dim) == (1, 2, 8)
    written = json.loads((exported / "config.json").read_text())
    assert written["rope_theta"] == 1e6  # where transformers 4 reads it
    assert written["torch_dtype"] == written["dtype"] == "float32"
    generation = json.loads((exported / "generation_config.json").read_text(encoding="utf-8"))
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer = AutoTokenizer.from_pretrained(exported)
    markers = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token)
    assert markers == ("<s>", "</s>", "<unk>")
    assert (tokenizer.model_max_length, len(tokenizer)) == (SHAPE["max_seq_len"], VOCAB_SIZE)
    assert set(tokenizer("a")) == {"input_ids", "attention_mask"}  # generate() refuses other keys
    assert tokenizer.chat_template is None


def test_auto_tokenizer_gives_equal_ids_and_text(weights, exported):
    ours = load_trained(str(weights)).tokenizer
    theirs = AutoTokenizer.from_pretrained(exported)
    chooser, ids = random.Random(0), range(ours.vocab_size)
    texts = [*NASTY.values(), *(ours.decode(chooser.choices(ids, k=20)) for _ in range(500))]
    for text in texts:
        ids = ours.encode(text)
        markers = [name for name in ("<s>", "</s>", "<unk>") if name in text]
        as_text = {"split_special_tokens": True} if markers else {}
        given = theirs(text, add_special_tokens=False, **as_text)["input_ids"]
        assert given == ids, repr(text)
        assert theirs(text, **as_text)["input_ids"] == [ours.bos_id, *ids]
        assert theirs.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


def test_a_batch_of_texts_is_padded_and_continued_as_each_text_alone(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)

    def write(*texts: str) -> torch.Tensor:
        batch = tokenizer([*texts], padding=True, return_tensors="pt")
        return model.generate(**batch, max_new_tokens=8, do_sample=False)[0]

    alone = write("1")
    assert torch.equal(write("1", "sum 1 + 1 =")[-len(alone) :], alone)


def test_a_program_without_the_exported_tokenizer_renders_messages_as_they_are(weights, tmp_path):
    """llama.cpp's converter copies the template, and the setting for the space before a text."""
    (shutil.copytree(weights, tmp_path / "w") / TEMPLATE_FILE).write_text(PLAIN_JINJA)
    export_hf.main([str(tmp_path / "w"), str(tmp_path / "hf")])
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text(encoding="utf-8"))
    messages = [{"role": "user", "content": "a < b <div> </s>"}]
    markers = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    render = jinja2.Template(settings["chat_template"]).render
    said = "<s>user\na < b <div> </s></s>\n<s>assistant\n"
    assert render(messages=messages, **markers) == said
    assert settings["add_prefix_space"] is False
    messages[0]["content"] = "a < b <div>"
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == said.replace(" </s></s>", "</s>")


def save_again(packed: Path, folder: Path, dtype: str = "float32", **changes) -> Path:
    """Export a chat model, and load and save it with transformers, as TRL and PEFT do. `folder`
    gets weights/, hf/ and again/; return again/."""
    weights = write_weights(folder / "weights", packed, **changes)
    (weights / TEMPLATE_FILE).write_text(PLAIN_JINJA, encoding="utf-8")
    export_hf.main([str(weights), str(folder / "hf")])
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["1 + 1", "1"], padding=True, truncation=True, max_length=9)  # changes tokenizer.json
    for part in (model, tokenizer):
        part.save_pretrained(folder / "again")
    return folder / "again"


def test_a_special_token_that_somebody_adds_is_one_id_in_texts_and_in_messages(packed, tmp_path):
    theirs = AutoTokenizer.from_pretrained(save_again(packed, tmp_path))
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    theirs.save_pretrained(tmp_path / "more")
    for tokenizer in (theirs, AutoTokenizer.from_pretrained(tmp_path / "more")):
        ids = tokenizer("<|im_start|>hi</s>", add_special_tokens=False).input_ids
        assert (ids[0], ids[-1]) == (VOCAB_SIZE, 2)
        messages = [{"role": "user", "content": "a<|im_start|>b</s>"}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        assert (ids.count(VOCAB_SIZE), ids.count(2)) == (1, 1)


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("float32", {"tie_embeddings": False}),
        ("bfloat16", {"tie_embeddings": True}),
        ("bfloat16", {"tie_embeddings": False, "qk_norm": True}),
        ("float32", {"tie_embeddings": False, "use_moe": True, "moe_hidden_dim": 24}),
    ],
)
def test_an_export_saved_by_transformers_is_imported_with_tokenizer_and_template(
    packed, tmp_path, dtype, changes
):
    again = save_again(packed, tmp_path, dtype, **changes)
    assert (again / "chat_template.jinja").exists()
    assert json.loads((again / "tokenizer.json").read_text(encoding="utf-8"))["truncation"]
    import_weights.main([str(again), str(tmp_path / "back")])
    back, ours = tmp_path / "back", load_file(tmp_path / "weights" / "model.safetensors")
    trained = load_trained(str(back))
    assert trained.chats
    turns = [Turn("user", "</s>"), Turn("assistant", "<s>")]
    for folder in (tmp_path / "hf", again):
        theirs = AutoTokenizer.from_pretrained(folder)
        ids = theirs.apply_chat_template([turn._asdict() for turn in turns], return_dict=False)
        assert ids == encode_conversation(trained.tokenizer, turns)[0]
    assert (back / "tokenizer.model").read_bytes() == (packed / "tokenizer.model").read_bytes()
    assert load_portable(back).config == load_portable(tmp_path / "weights").config
    stored = load_file(back / "model.safetensors")
    assert stored.keys() == ours.keys()
    kind = getattr(torch, dtype)
    assert all(torch.equal(stored[name], ours[name].to(kind).float()) for name in stored)


def test_another_chat_template_is_left_out_and_a_changed_tokenizer_refused_unless_one_is_passed(
    packed, tmp_path, refusal, capsys
):
    again = save_again(packed, tmp_path)
    template = again / TEMPLATE_FILE
    template.write_text(PLAIN_JINJA.replace("'\\n'", "' '"))
    import_weights.main([str(again), str(tmp_path / "other")])
    assert "tokenizer.json, without its chat template" in capsys.readouterr().out
    assert not load_trained(str(tmp_path / "other")).chats
    template.write_text(PLAIN_JINJA)
    tokenizer = AutoTokenizer.from_pretrained(again)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(again)
    line = refusal(import_weights, again, tmp_path / "out")
    assert "again/tokenizer.json: only byte-level BPE" in line
    assert "pass --tokenizer FOLDER/tokenizer.model" in line
    flags = ["--tokenizer", str(packed / "tokenizer.model")]
    import_weights.main([str(again), str(tmp_path / "mine"), *flags])
    imported = load_trained(str(tmp_path / "mine"))
    assert imported.chats
    assert imported.tokenizer.encode("1 + 1") == Tokenizer(flags[1]).encode("1 + 1")
    assert "chat template" not in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", TEMPLATE_FILE):
        (again / name).unlink()  # as PEFT's merge_and_unload().save_pretrained leaves the folder
    for name in ("weights", "hf"):
        flags = ["--tokenizer", str(tmp_path / name), "--overwrite"]
        import_weights.main([str(again), str(tmp_path / "mine"), *flags])
        assert load_trained(str(tmp_path / "mine")).chats


def test_a_tokenizer_that_cannot_be_converted_is_refused_or_left_out(weights, tmp_path, refusal):
    shutil.copytree(weights, tmp_path / "w")
    path = tmp_path / "w" / "tokenizer.model"
    model = ModelProto.FromString(path.read_bytes())
    model.normalizer_spec.remove_extra_whitespaces = True
    path.write_bytes(model.SerializeToString())
    assert "removes spaces" in refusal(export_hf, tmp_path / "w", tmp_path / "hf")
    export_hf.main([str(tmp_path / "w"), str(tmp_path / "hf"), "--no-tokenizer"])
    assert not list((tmp_path / "hf").glob("tokenizer*"))
    assert logits_of(tmp_path / "hf").shape == (2, 40, VOCAB_SIZE)


def test_an_export_is_no_run_and_a_folder_of_weights_is_not_replaced(
    weights, exported, tmp_path, refusal
):
    assert "python -m scripts.import_weights" in refusal(export_hf, exported, tmp_path / "out")
    other = shutil.copytree(weights, tmp_path / "other")
    assert "is no export" in refusal(export_hf, weights, other, "--overwrite")
