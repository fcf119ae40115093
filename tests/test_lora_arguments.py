import pytest
from small_model import opinionated

from common.errors import UsageError
from model.lora import LoRA
from training.lora_arguments import LoRAArguments


def test_without_lora_dim_a_model_stays_as_it_is():
    model = opinionated(50, 16)
    LoRAArguments().adapt(model)
    assert model.lora is None
    assert all(p.requires_grad for p in model.parameters())


def test_the_flags_are_what_adapters_are_made_of():
    model = opinionated(50, 16)
    flags = {"lora_module_name": "attention", "only_optimize_lora": True}
    LoRAArguments(lora_dim=8, lora_alpha=4.0, **flags).adapt(model)
    assert model.lora == LoRA(dim=8, alpha=4.0, module_name="attention", only_lora=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"only_optimize_lora": True}, "^--only_optimize_lora is about adapters: pass --lora_dim"),
        ({"lora_alpha": 8.0}, "^--lora_alpha is about adapters"),
        ({"lora_module_name": "wq"}, "^--lora_module_name is about adapters"),
        ({"lora_dim": 0}, "^--lora_dim must be at least 1, not 0$"),
        ({"lora_dim": 8, "lora_alpha": -1.0}, "^--lora_alpha must be positive"),
        ({"batch_size": 0}, "^--batch_size must be at least 1"),
    ],
)
def test_what_cannot_work_is_one_line(flags, message):
    with pytest.raises(UsageError, match=message):
        LoRAArguments(**flags)
