"""A small Llama-like transformer in plain PyTorch."""

from model.attention import Attention, repeat_kv
from model.config import ConfigError, LMConfig
from model.loss import IGNORE_INDEX
from model.norm import RMSNorm
from model.rotary import apply_rotary_emb, precompute_pos_cis
from model.transformer import FeedForward, Transformer, TransformerBlock
