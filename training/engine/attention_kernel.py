"""Which attention will run, asked of PyTorch rather than guessed."""

import torch

from model import LMConfig
from model.attention import takes_grouped_heads

KERNELS = {1: "flash attention", 2: "memory-efficient attention", 3: "cuDNN attention"}
MATH = 0  # torch.nn.attention.SDPBackend: no kernel of its own, all T × T scores in memory


def attention_kernel(
    config: LMConfig, dtype: torch.dtype, device: torch.device
) -> tuple[str, bool]:
    """Return the name of the attention that runs, and whether it keeps all T × T scores.

    Args:
        dtype: of queries, keys and values.
    """
    if not config.use_flash_attn:
        return "plain: all T × T scores (--use_flash_attn for the fast paths)", True
    if device.type == "cpu":
        if config.dropout:
            return "plain: all T × T scores (blocks of rows have no dropout)", True
        return "blocks of rows", False
    choice = fused_choice(config, dtype, device)
    if choice == MATH:
        return "all T × T scores: no fused kernel of PyTorch takes these shapes here", True
    return KERNELS.get(choice, "PyTorch's fused kernels, it does not say which"), False


def fused_choice(config: LMConfig, dtype: torch.dtype, device: torch.device) -> int | None:
    """Return PyTorch's kernel for such tensors, as numbered in torch.nn.attention.SDPBackend.

    None where PyTorch does not tell: the question is not part of its public interface.
    """
    n_kv_heads = config.n_kv_heads if takes_grouped_heads(dtype) else config.n_heads
    q, k, v = (
        # With gradients: not every kernel has a backward pass for every shape.
        torch.empty(
            *(1, heads, config.max_seq_len, config.head_dim),
            dtype=dtype,
            device=device,
            requires_grad=True,
        )
        for heads in (config.n_heads, n_kv_heads, n_kv_heads)
    )
    shared = n_kv_heads != config.n_heads
    try:
        return torch._fused_sdp_choice(
            q, k, v, dropout_p=config.dropout, is_causal=True, enable_gqa=shared
        )
    except (AttributeError, TypeError, RuntimeError):
        return None
