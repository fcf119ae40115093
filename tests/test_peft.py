"""Adapters on disk, compared with the package `peft` itself."""

from types import SimpleNamespace

import pytest
import torch
from small_model import adapted

from lm.formats.hugging_face import write_model
from lm.formats.peft import save_adapter
from lm.formats.portable import load_portable, save_portable
from model import Transformer
from model.lora import LoRA, add_lora, is_adapter
from scripts import import_weights

MARKERS = SimpleNamespace(bos_id=1, eos_id=2, more_end_ids=())
TOKENS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


def untied() -> Transformer:
    """Return an untied model. Block 0 has adapters. Weights without an adapter are trained too."""
    config = adapted().config
    config.tie_embeddings = False
    torch.manual_seed(0)
    model = add_lora(Transformer(config).eval(), LoRA(3, 5.0, "layers.0", only_lora=False))
    for p in model.parameters():
        p.data.normal_(0, 0.2)
    return model


@pytest.fixture(params=["all blocks adapted", "untied, one block adapted", "qk_norm"])
def run(request, tmp_path) -> SimpleNamespace:
    """A model with adapters, changed as by training, and a folder: base/ has the initial weights,
    exported/ has them in Hugging Face's format, adapter/ has the trained parameters for PEFT."""
    changes = {"qk_norm": request.param == "qk_norm"}
    model = untied() if "untied" in request.param else adapted(only_lora=False, **changes)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not is_adapter(n)}
    for name, p in model.named_parameters():
        if p.requires_grad and not is_adapter(name):
            p.data += torch.randn(p.shape) / 10
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for name in ("base", "exported", "adapter"):
        (tmp_path / name).mkdir()
    save_portable(tmp_path / "base", model.config, base)
    plain = load_portable(tmp_path / "base")
    write_model(tmp_path / "exported", plain, MARKERS, "float32")
    save_adapter(tmp_path / "adapter", model.config, trained, model.lora)
    return SimpleNamespace(model=model, path=tmp_path)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


def test_peft_on_the_exported_base_gives_equal_logits_and_its_merged_model_can_be_imported(run):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(run.path / "exported", local_files_only=True)
    assert (logits(base) - logits(run.model)).abs().max() > 0.1
    theirs = PeftModel.from_pretrained(base, run.path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(run.model), rtol=1e-4, atol=1e-4)
    theirs.merge_and_unload().save_pretrained(run.path / "merged")
    import_weights.main([str(run.path / "merged"), str(run.path / "imported")])
    ours = load_portable(run.path / "imported")
    torch.testing.assert_close(logits(ours), logits(run.model), rtol=1e-4, atol=1e-4)
