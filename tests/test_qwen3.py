"""Models with norms of queries and keys, and their chat templates, come in and go out: Qwen3 and
Qwen3-MoE of transformers, and MiniMind-3."""

import json
from pathlib import Path

import pytest
import torch
from conftest import error_of
from json_tokenizers import write_tokenizer
from safetensors.torch import load_file
from test_chat_template import MARKERS, TURNS
from test_import_weights import assert_same_model, write_theirs
from test_tokenizer import NASTY
from transformers import AutoTokenizer

from lm.data.chat_template import TEMPLATE_FILE, JinjaTemplate, encode_chat_prompt
from lm.data.conversations import Turn
from lm.inference.generation import StreamedText
from lm.inference.sampling import Sampling
from lm.storage.weights import load_trained
from scripts import export_hf, import_weights

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS = {"qwen3": {}, "qwen3_moe": EXPERTS | {"norm_topk_prob": True}}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_qwen3_of_transformers_has_equal_logits_here_and_when_exported_again(
    packed, tmp_path, kind, tied
):
    source = write_theirs(tmp_path / "theirs", kind, tie_word_embeddings=tied, **KINDS[kind])
    flags = ["--tokenizer", str(packed / "tokenizer.model")]
    import_weights.main([str(source), str(tmp_path / "ours"), *flags])
    assert_same_model(tmp_path / "ours", source)
    export_hf.main([str(tmp_path / "ours"), str(tmp_path / "back")])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == kind
    names, theirs = (
        load_file(tmp_path / x / "model.safetensors").keys() for x in ("back", "theirs")
    )
    assert names == theirs  # no shared expert is faked
    assert_same_model(tmp_path / "ours", tmp_path / "back")


def write_minimind_3(folder: Path, kind: str) -> dict:
    """Write a MiniMind-3, which is a tied Qwen3, with MiniMind's config.json; return its weights.
    MiniMind writes the settings of experts for dense models too."""
    one = {"num_experts": 4, "num_experts_per_tok": 1} if kind == "qwen3_moe" else {}
    write_theirs(folder, kind, tie_word_embeddings=True, **KINDS[kind] | one)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    written = json.loads((folder / "config.json").read_text())
    config = written | {
        **{"model_type": "minimind", "use_moe": bool(one), "rope_parameters": None},
        **{"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24},
        **{"rope_theta": 1e6, "rope_scaling": None, "inference_rope_scaling": False},
        **{"norm_topk_prob": True, "router_aux_loss_coef": 5e-4, "tie_word_embeddings": True},
    }
    (folder / "minimind.json").write_text(json.dumps(config))
    return weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["state dict", "folder"])
def test_minimind_3_has_equal_logits_here(tmp_path, refusal, capsys, form, kind):
    weights, source, flags = write_minimind_3(tmp_path / "theirs", kind), tmp_path / "m.pth", []
    torch.save(weights, source)
    if form == "folder":
        (tmp_path / "folder").mkdir()
        source = source.rename(tmp_path / "folder" / "pytorch_model.bin").parent
        (tmp_path / "theirs" / "minimind.json").rename(source / "config.json")
    elif kind == "qwen3_moe":
        line = refusal(import_weights, source, tmp_path / "out")
        assert "pass --num_experts_per_tok (minimind-3-moe has 1)" in line
        flags = ["--num_experts_per_tok", "1"]
    import_weights.main([str(source), str(tmp_path / "out"), *flags])
    assert_same_model(tmp_path / "out", tmp_path / "theirs")
    said = capsys.readouterr().out.splitlines()[-1]
    if form == "state dict":
        assert "n_heads 8, norm_eps 1e-06 (assumed), rope_theta 1e+06 (assumed)" in said
        assert ("norm_topk_prob 1 (assumed)" in said) == (kind == "qwen3_moe")


# Parts of real templates: loops with break and continue, JSON, a block for thinking, refusals.
TEMPLATE = """\
{%- if tools is not none or documents is not none %}
    {{- raise_exception("there is nothing to use") }}
{%- endif %}
{{- bos_token }}{{ pad_token }}
{%- set state = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}
        {%- set state.last = loop.revindex0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if not message.content %}{% continue %}{% endif %}
    {%- set text = message.content %}
    {%- if message.role == "system" %}
        {%- set text = text | tojson %}
    {%- elif message.role == "assistant" and loop.index0 < state.last %}
        {%- set text = text.split("</think>")[-1].lstrip("\\n") %}
    {%- endif %}
    {{- "<|start_header_id|>" + message.role + "\\n" + text + "<|eot_id|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant\\n<think>\\n" }}
    {%- if not enable_thinking %}
        {%- generation %}{{- "\\n</think>\\n\\n" }}{% endgeneration %}
    {%- endif %}
{%- endif %}
 """


def write_chat_model(folder: Path, texts: list[str], listed: bool = False) -> Path:
    """Write a Qwen3 with a tokenizer.json and a chat template, as transformers 4 writes it."""
    write_tokenizer(write_theirs(folder, "qwen3"), "llama3", texts, names=("<think>", "</think>"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    if listed:  # as in models with several templates; the tokenizer has no bos_token
        others = [{"name": "tool_use", "template": "{{ tools }}"}]
        config["chat_template"] = [*others, {"name": "default", "template": TEMPLATE}]
        config["pad_token"] = config.pop("bos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("listed", [False, True])
def test_a_models_own_chat_template_gives_transformers_ids_here_and_in_an_export(
    texts, tmp_path, listed
):
    source = write_chat_model(tmp_path / "theirs", texts, listed=listed)
    import_weights.main([str(source), str(tmp_path / "ours")])
    export_hf.main([str(tmp_path / "ours"), str(tmp_path / "hf")])
    import_weights.main([str(tmp_path / "hf"), str(tmp_path / "again")])
    assert (tmp_path / "again" / TEMPLATE_FILE).read_text() == TEMPLATE
    trained = load_trained(str(tmp_path / "ours"))
    theirs = [AutoTokenizer.from_pretrained(path) for path in (source, tmp_path / "hf")]
    conversations = [TURNS[:n] for n in (1, 2, 3, 5)]
    for text in (*NASTY.values(), *MARKERS, "第<3>'&", ""):
        roles = ("system", "user", "assistant", "user")
        conversations.append([Turn(role, text) for role in roles])
    for turns in conversations:
        ids = encode_chat_prompt(trained.tokenizer, turns)
        for tokenizer in theirs:
            messages = [turn._asdict() for turn in turns]
            options = {"add_generation_prompt": True, "return_dict": False}
            assert tokenizer.apply_chat_template(messages, **options) == ids, turns


def test_an_older_import_keeps_the_tokens_of_its_template_in_a_section(texts, tmp_path):
    file = write_tokenizer(tmp_path, "llama3", texts) / "tokenizer.json"
    marked = JinjaTemplate(TEMPLATE, str(file)).tokens
    tokens = {"template_tokens": {"bos_token": {"content": "<b>"}, "eos_token": "<e>"}}
    file.with_name("tokenizer_config.json").write_text(json.dumps(marked | tokens))
    assert JinjaTemplate(TEMPLATE, str(file)).tokens == {"bos_token": "<b>", "eos_token": "<e>"}


def test_a_template_that_refuses_a_message_or_fails_is_an_error_of_one_line(texts, tmp_path):
    file = str(write_tokenizer(tmp_path, "llama3", texts) / "tokenizer.json")
    for source, says in (
        ("{{ raise_exception('a\\nb') }}", "a b"),
        ("{% if %}", "Expected an expr"),
    ):
        line = error_of(JinjaTemplate(source, file).encode, [Turn("user", "1")])
        assert line.startswith(f"the model's chat template: {says}")


@pytest.mark.parametrize(
    ("config", "generation"),
    [(2, [2, 396]), ([2, 396], None), (396, None), (None, 396)],
)
def test_an_answer_ends_at_each_end_token_of_config_json_and_generation_config_json(
    texts, tmp_path, config, generation
):
    source = write_chat_model(tmp_path / "theirs", texts)
    values = json.loads((source / "config.json").read_text()) | {"eos_token_id": config}
    (source / "config.json").write_text(json.dumps(values))
    (source / "generation_config.json").unlink(missing_ok=True)
    if generation:
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    import_weights.main([str(source), str(tmp_path / "ours")])
    export_hf.main([str(tmp_path / "ours"), str(tmp_path / "hf")])
    import_weights.main([str(tmp_path / "hf"), str(tmp_path / "again")])
    for name in ("ours", "again"):
        tokenizer = load_trained(str(tmp_path / name)).tokenizer
        assert tokenizer.eos_id != 396
        settings = {"prompt": [1], "max_new_tokens": 9, "sampling": Sampling()}
        text = StreamedText(**settings, tokenizer=tokenizer, deliver=lambda *_: None)
        text.take(5)
        text.take(396)
        assert (text.ids, text.finish_reason) == ([5], "stop")
