import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, run
from safetensors.torch import load_file
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from test_tokenizer import NASTY
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.chat_template import PLAIN_JINJA, TEMPLATE_FILE, encode_conversation
from data.conversations import Turn
from formats import hugging_face_check, hugging_face_export
from formats import hugging_face_names as llama_format
from formats.portable import load_portable, save_portable
from model import LMConfig, Transformer
from runs.weights import load_trained
from scripts import export_hf, import_weights

SHAPE = {"dim": 48, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "max_seq_len": 40}


def write_weights(folder: Path, packed: Path, **changes) -> Path:
    """Portable weights of a model whose logits are of ordinary size, and the tokenizer."""
    torch.manual_seed(0)
    model = Transformer(LMConfig(vocab_size=VOCAB_SIZE, **SHAPE | changes))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.mul_(5)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_portable(folder, model.config, weights)
    shutil.copy(packed / "tokenizer.model", folder)
    return folder


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "w", packed)


@pytest.fixture(scope="module")
def exported(weights, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "deep" / "hf"
    export_hf.main([str(weights), str(out)])
    return out


def error_line(capsys, *argv) -> str:
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as ended:
        export_hf.main(list(map(str, argv)))
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("export_hf: error: ")
    return lines[0]


def some_tokens(length=40) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(1))


def logits_of(folder: Path, tokens: torch.Tensor, **how) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **how)(tokens).logits


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 6])
def test_transformers_computes_equal_logits(packed, tmp_path, tie_embeddings, n_kv_heads):
    changes = {"tie_embeddings": tie_embeddings, "n_kv_heads": n_kv_heads, "rope_theta": 1e4}
    weights = write_weights(tmp_path / "w", packed, **changes)
    export_hf.main([str(weights), str(tmp_path / "hf"), "--no-check"])
    with torch.no_grad():
        ours = load_portable(weights)(some_tokens()).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(logits_of(tmp_path / "hf", some_tokens()), ours, atol=1e-5, rtol=0)


def test_a_tied_matrix_is_stored_once_and_shared_when_loaded(exported):
    assert "lm_head.weight" not in load_file(exported / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_weights_are_rounded_to_the_dtype_asked_for(weights, tmp_path, dtype, capsys):
    export_hf.main([str(weights), str(tmp_path / "hf"), "--dtype", dtype])
    assert f"in fp32; {dtype} itself moved them by up to" in capsys.readouterr().out
    model, kind = load_portable(weights), getattr(torch, dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(kind).float()
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {kind}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == kind
    with torch.no_grad():
        ours = model(some_tokens()).logits
    theirs = logits_of(tmp_path / "hf", some_tokens(), dtype=torch.float32)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


def test_the_config_says_what_transformers_asks_for(exported):
    config = AutoModelForCausalLM.from_pretrained(exported).config
    assert config.rope_parameters["rope_theta"] == 1e6
    assert config.max_position_embeddings == SHAPE["max_seq_len"]
    assert (config.bos_token_id, config.eos_token_id, config.head_dim) == (1, 2, 8)
    written = json.loads((exported / "config.json").read_text())
    assert written["rope_theta"] == 1e6  # where version 4 looks for it
    assert written["torch_dtype"] == written["dtype"] == "float32"


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
def test_auto_tokenizer_gives_equal_ids_and_text(weights, exported, text):
    ours, theirs = load_trained(str(weights)).tokenizer, AutoTokenizer.from_pretrained(exported)
    ids = ours.encode(text)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert theirs(text)["input_ids"] == [ours.bos_id, *ids]
    assert theirs.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


def test_what_transformers_saves_again_is_still_equal_and_can_be_imported(
    weights, exported, tmp_path
):
    again, back = tmp_path / "again", tmp_path / "back"
    AutoModelForCausalLM.from_pretrained(exported).save_pretrained(again)
    AutoTokenizer.from_pretrained(exported).save_pretrained(again)
    ours, theirs = load_trained(str(weights)).tokenizer, AutoTokenizer.from_pretrained(again)
    texts = list(NASTY.values())
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ours.encode_batch(texts)
    import_weights.main([str(again), str(back), "--tokenizer", ours.path])
    first, second = (load_file(folder / "model.safetensors") for folder in (back, weights))
    assert all(torch.equal(first[name], second[name]) for name in first | second)


def test_auto_tokenizer_knows_the_markers_and_the_context(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        *("<s>", "</s>", "<unk>"),
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.model_max_length == SHAPE["max_seq_len"]
    assert len(tokenizer) == VOCAB_SIZE
    assert set(tokenizer("a")) == {"input_ids", "attention_mask"}  # all of it fits generate()


def test_greedy_generation_is_equal(weights, exported):
    trained = load_trained(str(weights))
    model, tokenizer = trained.model, AutoTokenizer.from_pretrained(exported)
    for prompt in ("sum 7: ", "1 + 1", "第"):
        ids = [1, *trained.tokenizer.encode(prompt)]
        start = len(ids)
        with torch.no_grad():
            while len(ids) < SHAPE["max_seq_len"] and ids[-1] != 2:
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        inputs = tokenizer(prompt, return_tensors="pt") | {"max_length": SHAPE["max_seq_len"]}
        theirs = AutoModelForCausalLM.from_pretrained(exported).generate(**inputs)[0].tolist()
        assert theirs == ids
        assert len(set(ids[start:])) > 1


def test_the_length_is_left_to_whoever_generates(exported):
    settings = json.loads((exported / "generation_config.json").read_text(encoding="utf-8"))
    assert settings == {"bos_token_id": 1, "eos_token_id": 2}


def test_the_check_says_what_it_compared(weights, tmp_path, capsys):
    export_hf.main([str(weights), str(tmp_path / "hf")])
    out = capsys.readouterr().out
    assert "logits of 2 × 40 tokens, up to 4, differ by " in out
    texts = len(hugging_face_check.NASTY_TEXTS) + hugging_face_check.RANDOM_TEXTS
    assert f"equal on {texts:,} texts" in out
    export_hf.main([str(weights), str(tmp_path / "unchecked"), "--no-check"])
    assert "not checked" in capsys.readouterr().out


def test_a_rotation_that_was_forgotten_is_found_and_nothing_is_left(
    weights, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(llama_format, "split_halves", lambda weight, heads: weight)
    assert "logits differ" in error_line(capsys, weights, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "values", "expected"),
    [
        ("tokenizer_config.json", {"split_special_tokens": False}, "differs on '<s>'"),
        ("tokenizer.json", {"post_processor": None}, "no begin marker"),
        ("tokenizer.json", {"normalizer": {"type": "NFKC"}}, "differs on"),
    ],
)
def test_a_tokenizer_that_is_not_equal_is_found(
    weights, tmp_path, monkeypatch, capsys, file, values, expected
):
    written = hugging_face_export.write_tokenizer

    def spoil(folder, tokenizer, max_seq_len, chat):
        written(folder, tokenizer, max_seq_len, chat=chat)
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")

    monkeypatch.setattr(hugging_face_export, "write_tokenizer", spoil)
    assert expected in error_line(capsys, weights, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_an_older_export_is_replaced_only_if_asked(weights, tmp_path, capsys):
    out = tmp_path / "hf"
    export_hf.main([str(weights), str(out), "--no-check"])
    assert "pass --overwrite" in error_line(capsys, weights, out)
    export_hf.main([str(weights), str(out), "--no-check", "--overwrite", "--dtype", "float16"])
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_export_that_fails_leaves_the_older_one(weights, tmp_path, monkeypatch, capsys):
    out = tmp_path / "hf"
    export_hf.main([str(weights), str(out), "--no-check"])
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(hugging_face_check, "TOLERANCE", -1)
    assert "check failed" in error_line(capsys, weights, out, "--overwrite")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_interrupted_export_never_has_its_name(weights, tmp_path, monkeypatch):
    def interrupt(folder, tokenizer, max_seq_len, chat):
        assert (folder / "model.safetensors").exists()
        assert not (tmp_path / "hf").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(hugging_face_export, "write_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_hf.main([str(weights), str(tmp_path / "hf")])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_export_is_never_replaced(weights, tmp_path, monkeypatch, capsys):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "llama"}')
    for out in (foreign, weights):
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        assert "is no export" in error_line(capsys, weights, out, "--overwrite")
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "file").touch()
    assert "is a file" in error_line(capsys, weights, tmp_path / "file", "--overwrite")
    monkeypatch.chdir(tmp_path)
    for out in (".", ".."):
        assert "the working folder or above" in error_line(capsys, weights, out)


def test_an_empty_folder_is_filled(weights, tmp_path):
    export_hf.main([str(weights), str(tmp_path / "hf"), "--no-check"])
    (tmp_path / "empty").mkdir()
    export_hf.main([str(weights), str(tmp_path / "empty"), "--no-check"])
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {path.name for path in (tmp_path / "empty").iterdir()} == names


def test_a_tokenizer_without_an_equal_is_refused_and_can_be_left_out(weights, tmp_path, capsys):
    shutil.copytree(weights, tmp_path / "w")
    path = tmp_path / "w" / "tokenizer.model"
    model = ModelProto.FromString(path.read_bytes())
    model.normalizer_spec.remove_extra_whitespaces = True
    path.write_bytes(model.SerializeToString())
    line = error_line(capsys, tmp_path / "w", tmp_path / "hf")
    assert "remove_extra_whitespaces" in line
    assert "--no-tokenizer" in line
    export_hf.main([str(tmp_path / "w"), str(tmp_path / "hf"), "--no-tokenizer"])
    assert "model without tokenizer" in capsys.readouterr().out
    assert not list((tmp_path / "hf").glob("tokenizer*"))
    assert logits_of(tmp_path / "hf", some_tokens()).shape == (2, 40, VOCAB_SIZE)


def test_mistakes_end_in_one_line_and_leave_nothing(weights, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(weights, bare)
    (bare / "tokenizer.model").unlink()
    cut = tmp_path / "cut"
    shutil.copytree(weights, cut)
    (cut / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes()[:1000])
    (tmp_path / "nothing").mkdir()
    before = sorted(tmp_path.iterdir())
    out = tmp_path / "hf"
    assert "no such folder" in error_line(capsys, tmp_path / "absent", out)
    assert "neither model.safetensors" in error_line(capsys, tmp_path / "nothing", out)
    assert "no such tokenizer file" in error_line(capsys, bare, out)
    assert f"{cut}: no readable weights" in error_line(capsys, cut, out)
    assert "--dtype" in error_line(capsys, weights, out, "--dtype", "int8")
    assert "did you mean --overwrite" in error_line(capsys, weights, out, "--overwrit3")
    assert sorted(tmp_path.iterdir()) == before


def test_a_corrupted_export_is_one_clear_line_when_it_is_used_as_a_run(exported, tmp_path, capsys):
    shutil.copytree(exported, tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    line = error_line(capsys, tmp_path / "hf", tmp_path / "out")
    assert "Hugging Face folder" in line
    assert "scripts.import_weights" in line


@pytest.fixture(scope="module")
def chat(weights, tmp_path_factory) -> Path:
    """The weights, as those of a model that has learned to answer."""
    folder = shutil.copytree(weights, tmp_path_factory.mktemp("chat") / "w")
    (folder / TEMPLATE_FILE).write_text(PLAIN_JINJA, encoding="utf-8")
    return folder


def test_a_model_that_answers_is_exported_with_its_template_and_checked(
    chat, exported, tmp_path, capsys
):
    export_hf.main([str(chat), str(tmp_path / "hf")])
    assert "ids of the chat template equal on 200 conversations" in capsys.readouterr().out
    card = (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    assert "It was fine-tuned to answer" in card
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    turns = [Turn("user", "</s>"), Turn("assistant", "<s>")]
    ids = tokenizer.apply_chat_template([t._asdict() for t in turns], return_dict=False)
    assert ids == encode_conversation(load_trained(str(chat)).tokenizer, turns)[0]
    for name, source in (("chats", tmp_path / "hf"), ("plain", exported)):
        import_weights.main([str(source), str(tmp_path / name)])
        assert load_trained(str(tmp_path / name)).chats == (name == "chats")
    AutoTokenizer.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.apply_chat_template([t._asdict() for t in turns], return_dict=False) == ids


def test_a_model_that_continues_text_is_exported_without_a_template(exported):
    assert AutoTokenizer.from_pretrained(exported).chat_template is None


def test_a_template_that_is_not_equal_is_found(chat, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hugging_face_export, "JINJA", PLAIN_JINJA)  # users could write markers
    assert "the chat template differs on" in error_line(capsys, chat, tmp_path / "hf")


@pytest.mark.slow
def test_the_command_exports_what_transformers_opens(weights, tmp_path):
    command = [sys.executable, "-m", "scripts.export_hf", str(weights), str(tmp_path / "hf")]
    ended = run(command)
    assert ended.code == 0, ended.out
    assert "token ids and decoded text equal" in ended.out
    assert logits_of(tmp_path / "hf", some_tokens()).std() > 0.1
