import weakref
from unittest.mock import Mock

import pytest
import torch
from small_model import opinionated
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm.inference.decoder import Decoder, packed
from model import Transformer

VOCAB = 97
SCALING = {"factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 4.0}
SCALING |= {"original_max_seq_len": 200}
SHAPES = [
    {},
    {"n_heads": 1, "n_kv_heads": 1},
    {"n_heads": 4, "n_kv_heads": 4},
    {"n_heads": 4, "n_kv_heads": 1},
    {"dim": 128, "n_heads": 1, "n_kv_heads": 1},
    {"head_dim": 24, "rope_scaling": SCALING},
    {"tie_embeddings": False},
    {"use_flash_attn": False, "dropout": 0.5},
    {"use_moe": True, "num_experts_per_tok": 2, "n_shared_experts": 1},
    {"qk_norm": True, "head_dim": 24, "norm_eps": 1e-3},
]


def transformer(**changes) -> Transformer:
    return opinionated(VOCAB, 150, **{"dim": 64, "n_layers": 3} | changes)


def ids(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def uncached(model: Transformer, texts: list[list[int]]) -> torch.Tensor:
    return torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cached_logits_equal_those_of_the_whole_sequence(shape):
    model = transformer(**shape)
    decoder, texts = Decoder(model), ids(5, 130, 64, 1, 5)
    cache, logits = decoder.read(texts)
    for token in ids(*[5] * 20):
        expected = uncached(model, texts)
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        for text, id in zip(texts, token, strict=True):
            text.append(id)
        logits = decoder.step(torch.tensor(token)[:, None], cache)
    torch.testing.assert_close(logits, uncached(model, texts), rtol=1e-5, atol=1e-5)


class FakeGraph(TorchDispatchMode):
    """Imitate a CUDA graph without a GPU. Recording runs no in-place operation, so existing tensors
    do not change. A replay runs the recorded operations on the same memory, without the Python code
    between them. Both are true of a real graph. A real graph also refuses operations that wait for
    the GPU; this one does not."""

    replays = 0  # of all graphs

    def __init__(self):
        super().__init__()
        self.recorded = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        in_place = operation._schema.is_mutable
        out = args[0] if in_place else operation(*args, **kwargs or {})
        self.recorded.append((operation, args, kwargs or {}, out))
        return out

    def replay(self):
        FakeGraph.replays += 1
        for operation, args, kwargs, out in self.recorded:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor changed in place
                    old.copy_(new)


def logits_of_a_batch(decoder: Decoder, lengths: tuple[int, int]) -> torch.Tensor:
    """Return all logits. Two sequences swap; later a third joins. With (40, 9) the cache grows."""
    cache, logits = decoder.read(ids(*lengths))
    tokens = torch.tensor(ids(*[3] * 100)).T
    rows = [*logits.clone()]
    for step in range(100):
        if step == 30:
            cache.keep([1, 0])
        if step == 60:
            cache.append(decoder.read(ids(40))[0])
        rows += decoder.step(tokens[: len(cache.lengths), step, None], cache).clone()
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [(5, 5), (40, 9)])
def test_recorded_steps_give_the_logits_of_separate_launches(monkeypatch, capsys, lengths):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graphs := Mock(side_effect=FakeGraph))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(FakeGraph, "replays", 0)
    decoder = Decoder(transformer())
    expected = logits_of_a_batch(decoder, lengths)
    graphs.assert_not_called()
    decoder.recorded = True
    torch.testing.assert_close(logits_of_a_batch(decoder, lengths), expected, rtol=0, atol=2e-6)
    assert graphs.call_count == 3 + (lengths == (40, 9))  # after `keep`, `append` and growth, too
    assert FakeGraph.replays > 90
    why = "operation not permitted when stream is capturing"
    monkeypatch.setattr(torch.cuda, "graph", Mock(side_effect=RuntimeError(why)))
    torch.testing.assert_close(logits_of_a_batch(decoder, lengths), expected, rtol=0, atol=2e-6)
    assert capsys.readouterr().err.count(f"generation is slower: {why}") == 1


def test_the_memory_of_a_dropped_cache_is_free_at_once():
    cache, _ = Decoder(transformer()).read(ids(3))
    keys = weakref.ref(cache.stored[0][0])
    del cache
    assert keys() is None


def test_decoding_switches_cudnn_attention_off(monkeypatch):
    """cuDNN would make a plan for every length of the cache."""
    enabled = []

    def attention(*qkv, **options):
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*qkv, **options)

    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    decoder = Decoder(transformer(n_layers=1))
    cache, _ = decoder.read(ids(3))
    decoder.step(torch.tensor([[7]]), cache)
    assert enabled == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()  # training may use cuDNN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_decoder_returns_fp32_logits_close_to_the_logits_of_fp32(dtype):
    model = transformer()
    texts = ids(20, 3)
    _, logits = Decoder(model, dtype).read(texts)
    expected = uncached(model, texts)
    assert logits.dtype == torch.float32
    assert 0 < (logits - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(7, 5), (600, 500)])  # fp32: below and above 2^18 weights
def test_packed_weights_give_the_products_of_the_original_weights(dtype, size):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(size[1], rows, bias=False, dtype=dtype) for rows in (size[0], 3)]
    x = torch.randn(2, 4, size[1]).to(dtype)
    expected = torch.cat([x.double() @ layer.weight.detach().double().T for layer in layers], -1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    with torch.no_grad():
        error = (packed(*layers, dtype=dtype)(x).double() - expected).abs().max()
    assert error / expected.abs().max() < tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_on_a_gpu_equal_those_on_the_cpu(shape):
    model = transformer(**shape)
    texts, token = ids(5, 130, 64, 1), [1, 2, 3, 4]
    expected = uncached(model, [[*text, id] for text, id in zip(texts, token, strict=True)])
    decoder = Decoder(model.cuda())
    cache, _ = decoder.read(texts)
    logits = decoder.step(torch.tensor(token, device="cuda")[:, None], cache).cpu()
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
