import pytest
import torch
from torch.nn.attention import SDPBackend

from model import LMConfig
from training.engine.device import KERNELS, MATH, attention_kernel, fused_choice

CPU, GPU = torch.device("cpu"), torch.device("meta")  # meta stands in: any device but a CPU
CONFIG = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 32}


@pytest.mark.parametrize(
    ("changes", "said", "keeps_scores"),
    [
        ({"use_flash_attn": False}, "plain: all T × T scores (--use_flash_attn", True),
        ({"dropout": 0.1}, "plain: all T × T scores (blocks of rows have no dropout)", True),
        ({}, "blocks of rows", False),
    ],
)
def test_on_a_cpu_it_is_plain_or_blocks_of_rows(changes, said, keeps_scores):
    text, scores = attention_kernel(LMConfig(**CONFIG | changes), torch.float32, CPU)
    assert text.startswith(said)
    assert scores is keeps_scores


@pytest.mark.parametrize(
    ("choice", "said", "keeps_scores"),
    [
        (SDPBackend.CUDNN_ATTENTION, "cuDNN attention", False),
        (SDPBackend.FLASH_ATTENTION, "flash attention", False),
        (SDPBackend.EFFICIENT_ATTENTION, "memory-efficient attention", False),
        (SDPBackend.MATH, "all T × T scores: no fused kernel", True),
    ],
)
def test_the_kernel_that_pytorch_chooses_is_named(monkeypatch, choice, said, keeps_scores):
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: int(choice.value))
    text, scores = attention_kernel(LMConfig(**CONFIG), torch.bfloat16, GPU)
    assert said in text
    assert scores is keeps_scores


def test_pytorch_is_asked_about_the_tensors_that_attention_will_give_it(monkeypatch):
    asked = {}

    def choice(q, k, v, **options):
        asked[q.dtype] = (q.shape, k.shape, v.shape, q.requires_grad, options)
        return 1

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    for dtype in (torch.bfloat16, torch.float32):
        fused_choice(LMConfig(**CONFIG), dtype, GPU)
    wide, narrow = (1, 4, 32, 16), (1, 2, 32, 16)
    causal = {"dropout_p": 0.0, "is_causal": True}
    assert asked[torch.bfloat16] == (wide, narrow, narrow, True, causal | {"enable_gqa": True})
    assert asked[torch.float32] == (wide, wide, wide, True, causal | {"enable_gqa": False})


def test_this_pytorch_answers_the_question():
    assert fused_choice(LMConfig(**CONFIG), torch.float32, CPU) in (MATH, *KERNELS)
