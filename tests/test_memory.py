import pytest
import torch

from model import LMConfig
from training.engine import memory
from training.engine.memory import activation_bytes, available_memory, model_state_bytes

N = 1_000_000


@pytest.mark.parametrize(
    ("dtype", "zero_stage", "processes", "bytes_per_parameter"),
    [
        # without DeepSpeed: fp32 weights 4, gradients 4, moments 8
        ("bfloat16", None, 1, 16),
        ("bfloat16", None, 4, 16),
        ("float32", None, 4, 16),
        # 16 bits: weights 2, gradients 2 + 4 accumulated, master 4 and moments 8
        ("bfloat16", 1, 1, 2 + 6 + 12),
        ("bfloat16", 1, 4, 2 + 6 + 3),
        ("bfloat16", 2, 1, 2 + 6 + 12),
        ("bfloat16", 2, 4, 2 + 1.5 + 3),
        ("float16", 2, 4, 2 + 1.5 + 3),
        ("bfloat16", 3, 4, 0.5 + 1.5 + 3),
        # fp32: twice the weights and gradients
        ("float32", 2, 1, 4 + 8 + 12),
        ("float32", 2, 4, 4 + 2 + 3),
    ],
)
def test_weights_gradients_and_moments_by_hand(dtype, zero_stage, processes, bytes_per_parameter):
    states = model_state_bytes(N, dtype, zero_stage, processes)
    assert states == pytest.approx(N * bytes_per_parameter)


def test_muon_keeps_one_moment_less():
    for dtype, stage, processes in (("bfloat16", None, 4), ("float32", 1, 1)):
        adamw = model_state_bytes(N, dtype, stage, processes)
        assert adamw - model_state_bytes(N, dtype, stage, processes, n_by_muon=N // 2) == 2 * N
    zero2 = model_state_bytes(N, "bfloat16", 2, 4, n_by_muon=N)
    assert zero2 == N * (2 + 1.5 + 2)


def test_offload_takes_master_and_moments_off_the_device():
    assert model_state_bytes(N, "bfloat16", 2, 4, offload=True) == N * (2 + 1.5)


def small(**changes) -> LMConfig:
    settings = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 100}
    return LMConfig(**settings | {"max_seq_len": 32} | changes)


def test_activations_with_fused_attention_by_hand():
    layer = 64 * (6 * 2 + 4 * 4) + 128 * 4 * 2
    by_hand = 8 * 32 * (2 * layer + 100 * (2 + 8))
    assert activation_bytes(small(use_flash_attn=True), 8, "bfloat16") == by_hand


def test_activations_with_plain_attention_hold_the_scores_too():
    fused = activation_bytes(small(use_flash_attn=True), 8, "bfloat16")
    plain = activation_bytes(small(use_flash_attn=False), 8, "bfloat16")
    assert plain - fused == 8 * 2 * 4 * 32 * 32 * (4 + 4 + 2)  # batch, layers, heads, T × T


def test_a_fast_path_that_has_no_kernel_keeps_the_scores_of_plain_attention():
    left = activation_bytes(small(use_flash_attn=True), 8, "float32", keeps_scores=True)
    assert left == activation_bytes(small(use_flash_attn=False), 8, "float32")


def test_activations_in_fp32_by_hand():
    layer = 64 * (6 * 4 + 4 * 4) + 128 * 4 * 4
    by_hand = 8 * 32 * (2 * layer + 100 * (4 + 8))
    assert activation_bytes(small(use_flash_attn=True), 8, "float32") == by_hand


@pytest.mark.parametrize(
    ("what", "settings", "kept"),
    [
        ("blocks", {}, 64 * 2),  # a block's input
        ("selective", {}, 64 * 2 * 2),  # and attention's output
        ("selective", {"on_cpu": True}, 64 * 2 * 2 + 4 * (16 + 32) * 2),  # and its weights
        ("selective", {"keeps_scores": True}, 64 * 2),  # plain attention is recomputed
    ],
)
def test_recomputed_blocks_are_there_one_at_a_time(what, settings, kept):
    one = activation_bytes(small(n_layers=1, vocab_size=1), 8, "bfloat16", **settings)
    logits = 8 * 32 * (2 + 8)
    recomputed = activation_bytes(small(n_layers=5), 8, "bfloat16", **settings, recompute=what)
    assert recomputed == 5 * 8 * 32 * kept + one - logits


def test_where_the_logits_are_larger_than_a_block_they_count():
    wide = small(vocab_size=10_000)
    recomputed = activation_bytes(wide, 8, "bfloat16", recompute="blocks")
    assert recomputed == 8 * 32 * (2 * 64 * 2 + 10_000 * (2 + 8))


def test_activations_grow_with_the_batch():
    one, eight = (activation_bytes(small(), b, "bfloat16") for b in (1, 8))
    assert eight == 8 * one


CPU = torch.device("cpu")


def test_a_process_on_a_cpu_can_have_its_share_and_what_it_holds(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**32)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    share = 2**31
    before = available_memory(CPU, processes=8) - share
    assert before > 0  # of Python and PyTorch
    held = torch.ones(2**25)  # 128 MiB
    more = available_memory(CPU, processes=8) - share - before
    assert held.nbytes / 2 < more < 4 * held.nbytes
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # started without a launcher
    assert 2**29 + before / 2 < available_memory(CPU, processes=8) < share


def test_a_process_has_its_gpu_alone(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**32)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert available_memory(torch.device("cuda", 1), processes=8) == 2**32 + 2**20


def test_where_the_system_does_not_say_nothing_is_known(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    assert available_memory(CPU, processes=1) is None


@pytest.mark.parametrize(
    ("optimizer", "parameters", "dtype", "bytes_per_parameter"),
    [
        ("cpu", None, "bfloat16", 20 / 2 + 12),  # half of 8 processes are here
        ("cpu", "cpu", "bfloat16", 22 / 2 + 12),
        ("cpu", "cpu", "float32", 24 / 2 + 12),
        ("nvme", "nvme", "bfloat16", 8 / 2 + 12),
    ],
)
def test_ram_that_will_not_do_is_said_before_anything_is_built(
    monkeypatch, optimizer, parameters, dtype, bytes_per_parameter
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    needed = int(N * bytes_per_parameter)
    for free, warns in ((needed, False), (needed - 1, True), (None, False)):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        line = memory.ram_warning(N, dtype, 8, optimizer, parameters)
        assert (line is not None) == warns
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    assert f"{needed / 2**30:.1f} GiB of RAM" in memory.ram_warning(
        N, dtype, 8, optimizer, parameters
    )
    assert memory.ram_warning(N, dtype, 8, None, None) is None
