"""Adapters on disk, compared with the package `peft` itself."""

import json
from collections import ChainMap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import adapted

from data.chat_template import TEMPLATE_FILE
from formats.hugging_face import write_model
from formats.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, load_adapter, save_adapter
from formats.portable import load_portable, save_portable
from model import ConfigError, Transformer
from model.lora import Merged, add_lora, is_adapter, merged_weights
from scripts import merge_lora

MARKERS = SimpleNamespace(bos_id=1, eos_id=2)
TOKENS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


def untied() -> Transformer:
    """Return an untied model. Block 0 has adapters. Weights without an adapter are trained too."""
    config = adapted().config
    config.tie_embeddings = False
    torch.manual_seed(0)
    model = add_lora(
        Transformer(config).eval(), dim=3, alpha=5.0, module_name="layers.0", only_lora=False
    )
    for p in model.parameters():
        p.data.normal_(0, 0.2)
    return model


@pytest.fixture(params=["all", "untied, a block adapted"])
def run(request, tmp_path) -> SimpleNamespace:
    """A trained model with adapters, its base as portable and as exported weights, and its saved
    adapter."""
    model = adapted(only_lora=False) if request.param == "all" else untied()
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not is_adapter(n)}
    for name, p in model.named_parameters():
        if p.requires_grad and not is_adapter(name):
            p.data += torch.randn(p.shape) / 10
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for name in ("base", "exported", "adapter"):
        (tmp_path / name).mkdir()
    save_portable(tmp_path / "base", model.config, base)
    plain = load_portable(tmp_path / "base")
    write_model(tmp_path / "exported", plain, MARKERS, dtype="float32", name="base", chat=False)
    save_adapter(tmp_path / "adapter", model.config, trained, model.lora)
    return SimpleNamespace(model=model, trained=trained, base=base, path=tmp_path)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


def test_peft_on_the_exported_base_gives_equal_logits(run):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(run.path / "exported", local_files_only=True)
    assert (logits(base) - logits(run.model)).abs().max() > 0.1
    theirs = PeftModel.from_pretrained(base, run.path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(run.model), rtol=1e-4, atol=1e-4)
    weights, scaling = load_adapter(run.path / "adapter", run.model.config)
    assert scaling == run.model.lora.scaling
    assert weights.keys() == run.trained.keys()
    assert all(torch.equal(weights[name], run.trained[name]) for name in weights)


def test_an_adapter_that_peft_wrote_is_read(run):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(run.path / "exported", local_files_only=True)
    settings = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "k_proj", "down_proj"])
    theirs = get_peft_model(base, settings)
    torch.manual_seed(2)
    for name, p in theirs.named_parameters():
        if "lora_" in name:
            p.data.normal_(0, 0.3)
    theirs.save_pretrained(run.path / "theirs")
    weights, scaling = load_adapter(run.path / "theirs", run.model.config)
    ours = Transformer(run.model.config).eval()
    merged = dict(Merged(ChainMap(weights, run.base), scaling))
    ours.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(ours), logits(theirs.eval()), rtol=1e-4, atol=1e-4)


def test_merge_lora_writes_the_merged_weights(run, monkeypatch, capsys):
    tokenizer = run.path / "base" / "tokenizer.model"
    tokenizer.write_bytes(b"of no matter")
    (run.path / "adapter" / TEMPLATE_FILE).write_text("says that it answers")
    base = load_portable(run.path / "base")
    trained = SimpleNamespace(model=base, tokenizer=SimpleNamespace(path=str(tokenizer)))
    trained.folder = run.path / "base"
    monkeypatch.setattr("storage.weights.load_trained", lambda name: trained)
    flags = [str(run.path / name) for name in ("base", "adapter", "merged")]
    merge_lora.main(flags)
    merged = load_portable(run.path / "merged")
    expected = merged_weights(dict(run.model.named_parameters()), run.model.lora)
    assert all(torch.equal(p, expected[name]) for name, p in merged.named_parameters())
    assert (run.path / "merged" / "tokenizer.model").read_bytes() == b"of no matter"
    assert (run.path / "merged" / TEMPLATE_FILE).read_text() == "says that it answers"
    with pytest.raises(SystemExit):
        merge_lora.main(flags)
    assert capsys.readouterr().err.strip().endswith("merged exists: pass --overwrite to replace it")


@pytest.fixture
def folder(tmp_path) -> Path:
    model = adapted()
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    save_adapter(tmp_path, model.config, trained, model.lora)
    return tmp_path


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HEAD = "base_model.model.lm_head.weight"


def renamed(tensors: dict, old: str, new: str) -> dict:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {Q_A: t[Q_A][:, 1:]}, r"wq.lora_a has shape \(4, 31\), the model needs"),
        (lambda t: {n: t[n] for n in t if n != Q_A}, "layers.0.attention.wq.lora_a is missing"),
        (lambda t: renamed(t, "layers.0", "layers.7"), "layers.7.* has shape .*, the model needs"),
        (
            lambda t: renamed(t, "lora_A.weight", "lora_magnitude_vector"),
            "is not a weight of Llama",
        ),
        (lambda t: t | {HEAD: torch.zeros(50, 32)}, "output layer and embedding were trained"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    tensors = change(load_file(folder / ADAPTER_WEIGHTS))
    save_file({n: tensors[n].contiguous() for n in tensors}, folder / ADAPTER_WEIGHTS)
    with pytest.raises(ConfigError, match=message):
        load_adapter(folder, adapted().config)


def with_settings(folder: Path, **settings) -> None:
    values = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(values | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"lora_alpha": "much"}, "r or lora_alpha missing"),
        ({"r": 5}, r"wk.lora_a has shape \(4, 32\), the model needs \(5, 32\)"),
    ],
)
def test_settings_that_are_not_supported_are_named(folder, settings, message):
    with_settings(folder, **settings)
    with pytest.raises(ConfigError, match=message):
        load_adapter(folder, adapted().config)


def test_rank_stabilized_scaling_is_read(folder):
    with_settings(folder, use_rslora=True)
    assert load_adapter(folder, adapted().config)[1] == 6 / 4**0.5
