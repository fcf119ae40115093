"""Adapters on disk, compared with the package `peft` itself."""

from types import SimpleNamespace

import pytest
import torch
from small_model import adapted

from lm.formats.hugging_face import write_model
from lm.formats.peft import save_adapter
from lm.formats.portable import load_portable, save_portable
from model.lora import is_adapter
from scripts import import_weights

MARKERS = SimpleNamespace(bos_id=1, eos_id=2, more_end_ids=())
TOKENS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


@pytest.mark.parametrize(
    "changes",
    [{}, {"module_name": "layers.0", "tie_embeddings": False}, {"qk_norm": True}],
    ids=str,
)
def test_peft_on_the_exported_base_gives_equal_logits_and_its_merged_model_can_be_imported(
    tmp_path, changes
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = adapted(only_lora=False, **changes)
    base = {name: p.data for name, p in model.named_parameters() if not is_adapter(name)}
    save_portable(tmp_path / "base", model.config, base)
    trained = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
    for name, p in trained.items():  # as by training, weights without an adapter change too
        if not is_adapter(name):
            p += torch.randn(p.shape) / 10
    for name in ("exported", "adapter"):
        (tmp_path / name).mkdir()
    write_model(tmp_path / "exported", load_portable(tmp_path / "base"), MARKERS, "float32")
    save_adapter(tmp_path / "adapter", model.config, trained, model.lora)

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", local_files_only=True)
    assert (logits(base) - logits(model)).abs().max() > 0.1
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-4)
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    import_weights.main([str(tmp_path / "merged"), str(tmp_path / "imported")])
    ours = load_portable(tmp_path / "imported")
    torch.testing.assert_close(logits(ours), logits(model), rtol=1e-4, atol=1e-4)
