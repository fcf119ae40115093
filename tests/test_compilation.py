import re
import sys

import pytest
import torch
from conftest import REPOSITORY, error_of, run
from test_transformer import some_tokens, transformer
from torch._dynamo.utils import get_optimize_ddp_mode

from lm.engine import compilation
from lm.engine.compilation import WORTH_FLOPS, compile_blocks, why_not_compile
from lm.engine.engine import Engine
from model import LMConfig, Transformer

needs_compiler = pytest.mark.skipif(
    compilation.obstacle(torch.device("cpu")) is not None, reason="no C++ compiler here"
)
LONG, SHORT = WORTH_FLOPS["cpu"], WORTH_FLOPS["cpu"] / 2
ASK = (
    "import torch; from lm.engine.compilation import obstacle; print(obstacle(torch.device('cpu')))"
)


@pytest.fixture(params=[None])
def reason(request, monkeypatch) -> None:
    """Sets the reason why compiling does not work; None: it works."""
    monkeypatch.setattr(compilation, "obstacle", lambda device: request.param)


@pytest.mark.parametrize(
    ("wanted", "recorded", "run_flops", "compiled"),
    [
        ("on", False, SHORT, True),
        ("off", True, LONG, False),
        ("auto", None, LONG, True),
        ("auto", None, SHORT, False),
        ("auto", True, SHORT, True),
        ("auto", False, LONG, False),
    ],
)
def test_auto_compiles_long_runs_and_keeps_the_choice_of_a_resumed_run(
    engine, reason, wanted, recorded, run_flops, compiled
):
    assert (why_not_compile(wanted, recorded, run_flops, engine) is None) is compiled


@pytest.mark.parametrize("reason", ["no compiler"], indirect=True)
def test_if_compiling_does_not_work_auto_says_why_and_on_is_an_error(engine, reason):
    assert why_not_compile("auto", True, LONG, engine) == "no compiler"
    said = "cannot compile: no compiler; pass --compile off"
    assert error_of(why_not_compile, "on", None, LONG, engine) == said


def test_zero_3_is_compiled_only_with_compile_on(accelerator, reason):
    zero_3 = Engine(accelerator, "ZeRO-3", {"zero_optimization": {"stage": 3}})
    assert "ZeRO-3" in why_not_compile("auto", True, LONG, zero_3)
    assert why_not_compile("on", True, LONG, zero_3) is None


@pytest.mark.slow
def test_a_failing_compiler_is_reported_in_one_line(tmp_path):
    broken, called = tmp_path / "g++", tmp_path / "called"
    broken.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    broken.chmod(0o755)
    # In a new process, because torch._inductor reads CXX only when it is imported.
    environment = {"CXX": str(broken), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ended = run([sys.executable, "-W", "ignore", "-c", ASK], **environment)
    assert called.exists(), ended.out
    assert ended.code == 0, ended.out
    assert ended.out.splitlines()[-1].startswith("torch.compile fails here: ")


@needs_compiler
@pytest.mark.slow
def test_a_path_that_breaks_the_compiler_gets_another_cache_or_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # set by the tests before
    clone = tmp_path / "a 'clone"
    clone.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", ASK]
    paths = {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    assert run(command, clone, **paths).worked() == "None\n"
    (clone / "tmp").mkdir()
    said = run(command, clone, **paths | {"TMPDIR": str(clone / "tmp")}).worked()
    assert f"a space or quote breaks PyTorch's C++ command: move {clone}/tmp/" in said


def test_a_cache_that_cannot_be_written_is_reported_in_one_line(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/cache")
    reason = compilation.obstacle(torch.device("cpu"))
    assert re.fullmatch(r"torch\.compile fails here: \[Errno .* '/proc/cache'", reason)


def test_ddp_does_not_split_the_graphs_of_compiled_blocks(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "optimize_ddp", True)
    compile_blocks(transformer())
    assert get_optimize_ddp_mode() == "no_optimization"


@needs_compiler
@pytest.mark.parametrize("changes", [{"use_moe": True}, {"qk_norm": True}], ids=str)
def test_compiled_blocks_give_the_loss_and_gradients_of_plain_uncompiled_blocks(changes):
    # CPU attention computes the 70 positions in blocks of 64 and 6.
    shape = {"dim": 64, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 70}
    results, tokens = [], torch.randint(0, 50, (2, 71))
    for fast in (False, True):
        torch.manual_seed(0)
        model = Transformer(
            LMConfig(**shape, **changes, n_layers=2, vocab_size=50, use_flash_attn=fast)
        )
        names = list(model.state_dict())
        if fast:
            compile_blocks(model)
        assert list(model.state_dict()) == names
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for reference, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=needs_compiler)], ids=["eager", "compiled"]
)
def test_a_16_bit_residual_stream_gives_nearly_the_loss_and_gradients_of_plain_fp32(compiled):
    tokens = some_tokens(38)
    results, streams = [], []
    for fast in (False, True):
        model = transformer(use_flash_attn=fast)
        model.layers[1].register_forward_pre_hook(lambda _, args: streams.append(args[0].dtype))
        if fast and compiled:
            compile_blocks(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert streams == [torch.float32, torch.bfloat16]
    (exact, *gradients), (close, *nearly) = results
    assert close.item() == pytest.approx(exact.item(), abs=0.003)
    for reference, ours in zip(gradients, nearly, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - reference).norm() < 0.03 * reference.norm()
