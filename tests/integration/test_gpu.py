"""Tests that need a CUDA device. `pytest -m gpu` runs only such tests."""

import re
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from conftest import Trained, run, train
from small_model import opinionated
from test_attention import heads as heads_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.engine.compilation import compile_blocks
from lm.engine.hardware import attention_kernel
from lm.inference import decoder
from lm.inference.decoder import Decoder
from lm.inference.generation import Batch, Continuation
from lm.inference.sampling import Sampling
from model import LMConfig, Transformer, apply_rotary_emb
from model.attention import fast_attention, mask_of, plain_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def train_on_gpu(engine: str, data, path, flags: str) -> Trained:
    if engine != "plain" and find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    return train(engine, 1, data, path, flags, start=run, CUDA_VISIBLE_DEVICES="0")


def heads(n_heads, n_kv_heads, head_dim):
    return [x.cuda() for x in heads_on_cpu((2, 200, n_heads, n_kv_heads, head_dim))]


@pytest.mark.parametrize(
    ("engine", "dtype", "tolerance"), [("plain", "float32", 1e-3), ("zero2", "bfloat16", 2e-2)]
)
def test_losses_on_a_gpu_are_those_of_fp32_on_the_cpu(packed, tmp_path, engine, dtype, tolerance):
    flags = "--max_steps 8 --learning_rate 1e-2 --accumulation_steps 2 --dtype"
    with ThreadPoolExecutor() as both:  # starting a process takes most of the time
        where = packed, tmp_path / "cpu", f"{flags} float32"
        on_cpu = both.submit(train, "plain", 1, *where, start=run)
        on_gpu = train_on_gpu(engine, packed, tmp_path / "gpu", f"{flags} {dtype}")
    if engine == "zero2":
        assert "DeepSpeed ZeRO-2, one reduction per step" in on_gpu.out
        assert "(nccl)" in on_gpu.out
    losses = on_cpu.result().column("loss")
    assert losses[-1] < losses[0] - 0.05
    assert on_gpu.column("loss") == pytest.approx(losses, rel=tolerance)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_on_a_gpu_is_that_of_double_precision(compiled, dtype):
    model = Transformer(LMConfig(dim=128, n_layers=1, n_heads=2, max_seq_len=200, vocab_size=50))
    q, k, *_ = (x.to(dtype) for x in heads(2, 1, 64))
    pos_cis = model.cuda().bfloat16().pos_cis
    assert pos_cis.dtype == torch.complex64
    rotate = torch.compile(apply_rotary_emb) if compiled else apply_rotary_emb
    for mine, x in zip(rotate(q, k, pos_cis), (q, k), strict=True):
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).cpu())
        exact = torch.view_as_real(pairs * pos_cis.cpu().to(torch.complex128)[:, None])
        error = (mine.double().cpu() - exact.flatten(-2)).abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(8, 2), (4, 4), (1, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_fused_kernels_give_outputs_and_gradients_of_fp32(kernel, head_dim, n_heads, n_kv_heads):
    *qkv, gradient = heads(n_heads, n_kv_heads, head_dim)
    exact = [x.requires_grad_() for x in qkv]
    out = plain_attention(*exact, 0.0)
    reference = [out, *torch.autograd.grad(out, exact, gradient)]
    rounded = [x.detach().bfloat16().requires_grad_() for x in qkv]
    with sdpa_kernel(kernel):
        out = fast_attention(*rounded, 0.0)
        ours = [out, *torch.autograd.grad(out, rounded, gradient.bfloat16())]
    for mine, theirs in zip(ours, reference, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masked_attention_gives_outputs_and_gradients_of_fp32(dtype):
    """Conversations in a row do not see each other."""
    *qkv, gradient = heads(8, 2, 64)
    batch, seq_len = qkv[0].shape[:2]
    starts = torch.arange(seq_len, device="cuda").expand(batch, -1) // 50 * 50
    results = []
    for attend, kind in ((plain_attention, torch.float32), (fast_attention, dtype)):
        rounded = [x.detach().to(kind).requires_grad_() for x in qkv]
        out = attend(*rounded, 0.0, mask_of(starts, kind))
        results.append([out, *torch.autograd.grad(out, rounded, gradient.to(kind))])
    for theirs, mine in zip(*results, strict=True):
        assert (mine.float() - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_recorded_in_cuda_graphs_give_the_tokens_of_separate_launches(dtype, monkeypatch):
    model = opinionated(50, 300).cuda()

    def tokens(recorded: bool, temperature: float) -> list[list[int]]:
        """Return three texts' ids. They end at different steps; the third begins at step 10."""
        made = Decoder(model, dtype)
        assert made.recorded
        made.recorded = recorded
        batch, how = Batch(made), Sampling(temperature=temperature)
        lengths = [(5, 30), (9, 200), (40, 60)]
        texts = [Continuation([*range(2, 2 + length)], n, how) for length, n in lengths]
        batch.add(texts[:2])
        for step in range(250):
            if step == 10:
                assert bool(batch._cache.replay) == recorded
                batch.add(texts[2:])
            if batch.texts:
                batch.step()
        assert made.recorded == recorded  # recording has not failed
        return [text.ids for text in texts]

    graphs = [tokens(True, temperature) for temperature in (0, 1)]
    if dtype == torch.float32:  # in 16 bits, rounding may change a token
        assert graphs == [tokens(False, temperature) for temperature in (0, 1)]
    monkeypatch.setattr(decoder, "record", lambda run, tokens: run)  # same kernels as in a graph
    assert graphs == [tokens(True, temperature) for temperature in (0, 1)]


def test_the_cpu_waits_for_the_gpu_only_to_read_the_tokens():
    batch = Batch(Decoder(opinionated(50, 300).cuda()))
    batch.add([Continuation([1, 2, 3], 9, Sampling(top_p=0.9))])
    for _ in range(3):
        batch.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = batch.decoder.step(batch._draw()[:, None], batch._cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch._cache.replay
    assert logits.isfinite().all()


def test_compiled_blocks_give_the_loss_and_gradients_of_plain_uncompiled_blocks():
    results = []
    tokens = torch.randint(0, 50, (2, 71), device="cuda")
    for fast in (False, True):
        torch.manual_seed(0)
        shape = {"dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 50}
        model = Transformer(LMConfig(**shape, use_flash_attn=fast)).cuda()
        if fast:
            compile_blocks(model)
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("enabled", [True, False])
def test_compiled_blocks_run_cudnn_attention_only_if_it_is_switched_on(enabled):
    """Validation, evaluation and generation switch it off."""
    torch.compiler.reset()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    shape = {"dim": 128, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 50}
    model = Transformer(LMConfig(**shape)).cuda().bfloat16()
    compile_blocks(model)
    # Each case has its own shape, because the compile cache on disk does not know the switch.
    tokens = torch.randint(0, 50, (2 + enabled, 129), device="cuda")
    with torch.profiler.profile() as profile:
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    said = attention_kernel(model.config, torch.bfloat16, torch.device("cuda"))
    torch.backends.cuda.enable_cudnn_sdp(True)
    ran = any("cudnn" in event.key.lower() for event in profile.key_averages())
    assert ran == ("cuDNN" in said)
    assert enabled or not ran


def test_a_loss_in_chunks_has_the_value_and_gradients_of_the_cpu(monkeypatch):
    monkeypatch.setattr("model.loss.LARGE_VOCABULARY", 0)
    monkeypatch.setattr("model.loss.GPU_CHUNK_LOGITS", 30 * 50)  # 4 chunks of 29 tokens, 1 of 26
    torch.manual_seed(0)
    shape = {"dim": 64, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 50}
    model, tokens, results = Transformer(LMConfig(**shape)), torch.randint(0, 50, (2, 72)), []
    for device in ("cpu", "cuda"):
        model, tokens = model.to(device), tokens.to(device)
        model.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        results.append([loss.item(), *(p.grad.to("cpu", copy=True) for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


def test_busy_and_idle_experts_in_bf16_give_the_output_and_gradients_of_fp32():
    torch.manual_seed(0)
    shape = {"dim": 64, "n_heads": 2, "vocab_size": 50, "moe_hidden_dim": 96, "use_moe": True}
    block = Transformer(LMConfig(**shape, n_layers=1, num_experts_per_tok=2)).cuda().layers[0]
    experts, x = block.feed_forward, torch.randn(2, 100, 64, device="cuda").abs()
    experts.router.data[3] = -1.0  # the last expert gets no token
    inputs, results = [experts.w1, experts.w2, experts.w3, experts.router], []
    for dtype in (torch.float32, torch.bfloat16):
        out, _ = experts(x.bfloat16().to(dtype))
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for reference, ours in zip(*results, strict=True):
        assert (ours.float() - reference).norm() < 0.03 * reference.norm()
    assert not any(gradient[3].any() for gradient in results[1][1:4])


@pytest.mark.parametrize(("found_inf", "steps"), [(0.0, 2), (1.0, 1)])
def test_fused_adamw_skips_a_step_whose_found_inf_is_set(found_inf, steps):
    weight = torch.nn.Parameter(torch.ones(9, device="cuda"))
    optimizer = torch.optim.AdamW([weight], fused=True)
    for value in (0.0, found_inf):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, float("nan") if value else 1.0)
        optimizer.found_inf = torch.tensor(value, device="cuda")
        optimizer.step()
    assert optimizer.state[weight]["step"] == steps
    assert optimizer.state[weight]["exp_avg"].isfinite().all()
    assert torch.equal(before, weight) == bool(found_inf)


@pytest.mark.parametrize(("compiled", "optimizer"), [("off", "adamw"), ("on", "muon")])
def test_zero2_over_nccl_trains_in_bf16_and_resumes(packed, tmp_path, compiled, optimizer):
    # Plain attention, because the backward pass of fused kernels adds in varying order.
    flags = f"--compile {compiled} --optimizer {optimizer} --no-use_flash_attn --max_steps 6"
    whole = train_on_gpu("zero2", packed, tmp_path / "run", f"{flags} --save_interval 3")
    assert "DeepSpeed ZeRO-2" in whole.out
    assert "nccl" in whole.out
    assert "precision: bf16" in whole.out
    losses, weights = whole.column("loss"), whole.tensors()
    middle = whole.checkpoint(step=3)
    again = train_on_gpu("zero2", packed, tmp_path / "run", f"{flags} --resume {middle}")
    assert again.column("loss")[-3:] == pytest.approx(losses[-3:], rel=2e-3)
    torch.testing.assert_close(again.tensors(), weights, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float32 --tf32"])
def test_precisions_train_with_fused_attention(packed, tmp_path, dtype):
    run = train_on_gpu("plain", packed, tmp_path / "run", f"--dtype {dtype} --max_steps 20")
    assert re.search("attention: (flash|memory-efficient|cuDNN) attention", run.out)
    assert ("precision: tf32" in run.out) == dtype.endswith("--tf32")
    losses = run.column("loss")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("engine", ["fp16", "zero1", "zero3", "zero3_offload"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_engines_train_in_every_precision(packed, tmp_path, engine, dtype):
    flags = f"--dtype {dtype} --max_steps 30 --learning_rate 1e-2"
    run = train_on_gpu(f"configs/{engine}.yaml", packed, tmp_path / "run", flags)
    losses = run.column("loss")
    assert losses[-1] < losses[0]
    assert {str(tensor.dtype) for tensor in run.tensors().values()} == {"torch.float32"}
