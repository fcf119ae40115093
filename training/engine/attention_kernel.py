"""Which attention will run, asked of PyTorch rather than guessed."""

import torch

from model import LMConfig
from model.attention import takes_grouped_heads

# As torch.nn.attention.SDPBackend numbers them; 0 is no kernel of its own.
KERNELS = {1: "flash attention", 2: "memory-efficient attention", 3: "cuDNN attention"}
MATH = 0


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
    return KERNELS.get(choice, f"PyTorch's fused kernel number {choice}"), False


def fused_choice(config: LMConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return PyTorch's kernel for such tensors, asked of its private interface."""
    n_kv_heads = config.n_kv_heads if takes_grouped_heads(dtype) else config.n_heads

    def tensor(heads: int) -> torch.Tensor:
        # With gradients: not every kernel has a backward pass for every shape.
        shape = (1, heads, config.max_seq_len, config.head_dim)
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

    q, k, v = tensor(config.n_heads), tensor(n_kv_heads), tensor(n_kv_heads)
    shared = n_kv_heads != config.n_heads
    return torch._fused_sdp_choice(
        q, k, v, dropout_p=config.dropout, is_causal=True, enable_gqa=shared
    )
