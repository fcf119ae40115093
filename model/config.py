"""The settings of the model: its sizes, and how it computes."""

import sys
from dataclasses import asdict, dataclass, field, fields

HOW_IT_COMPUTES = ("dropout", "use_flash_attn", "router_aux_loss")  # may change after training
# Fields that need use_moe. Settings of a dense model are stored without them.
EXPERTS = (
    *("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_hidden_dim"),
    *("router_aux_loss", "norm_topk_prob"),
)
LARGEST = 1 << 24  # upper limit of the integer settings of a model


class ConfigError(ValueError):
    """Settings of a model, or its weights, cannot be used."""


def setting(default, help_text: str, must=None, **metadata):
    """Return a dataclass field that becomes a flag with this help text, unless flag=False is given.
    `must` is None, or (description of the allowed values, function that checks a value)."""
    return field(default=default, metadata={"help": help_text, "must": must, **metadata})


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of `rotary_frequencies`. Raises ConfigError if a value is not above 0."""

    factor: float  # divides the frequency of channel pairs that turn slowly
    low_freq_factor: float  # a slow pair makes at most this many turns in the original context
    high_freq_factor: float  # a pair with at least this many turns keeps its frequency
    original_max_seq_len: int  # the original context, in tokens

    def __post_init__(self):
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise ConfigError(f"rope_scaling: {name} must be finite and above 0, not {value!r}")


@dataclass
class LMConfig:
    """Settings of a Llama-style decoder.

    If `hidden_dim` is None, it becomes 2/3 of 4·dim, rounded up to a multiple of `multiple_of`,
    as in Llama's release. If `head_dim` is None, it becomes dim / n_heads.

    Raises ConfigError if a value has the wrong type or is out of range, or if values contradict
    each other, for example if n_heads is not divisible by n_kv_heads."""

    dim: int = setting(512, "width of the residual stream")
    n_layers: int = setting(8, "transformer blocks")
    n_heads: int = setting(8, "query heads; must divide dim, unless head_dim is given")
    n_kv_heads: int = setting(2, "key/value heads, shared by query heads (grouped-query attention)")
    vocab_size: int = setting(6400, "pieces in the vocabulary", flag=False)  # from data or weights
    head_dim: int | None = setting(None, "channels per head, must be even (default: dim / n_heads)")
    hidden_dim: int | None = setting(None, "inner feed-forward width (default: computed from dim)")
    multiple_of: int = setting(64, "a computed hidden_dim is rounded up to a multiple of this")
    norm_eps: float = setting(1e-5, "added to the mean square in RMSNorm")
    rope_theta: float = setting(1e6, "base of the rotary frequencies")
    rope_scaling: RopeScaling | None = setting(  # noqa: RUF009  imported weights decide it
        None, "Llama 3.1's scaling of rotary frequencies", flag=False
    )
    qk_norm: bool = setting(
        False, "RMSNorm of each query and key head before it is rotated (Qwen3)"
    )
    max_seq_len: int = setting(512, "tokens per training sequence, and the context length")
    dropout: float = setting(0.0, "dropout on embeddings, attention weights and sublayer outputs")
    tie_embeddings: bool = setting(True, "share the matrix of input embedding and output layer")
    use_moe: bool = setting(False, "experts instead of one feed-forward network in each block")
    n_routed_experts: int = setting(4, "experts of a block that the router can choose")
    num_experts_per_tok: int = setting(1, "experts that the router chooses for a token")
    n_shared_experts: int = setting(0, "additional experts of a block, which every token uses")
    moe_hidden_dim: int | None = setting(None, "inner width of an expert (default: hidden_dim)")
    router_aux_loss: float = setting(0.1, "factor of the balancing loss in the training loss")
    norm_topk_prob: bool = setting(False, "divide chosen probabilities by their sum", flag=False)
    use_flash_attn: bool = setting(
        True,
        "fast attention: PyTorch's fused kernels on a GPU, blocks of rows on a CPU (if dropout is "
        "0); without it, plain matrix products and softmax over T × T scores (T: sequence length)",
    )

    def __post_init__(self):
        for item in fields(self):
            self._check_type(item.name, item.type)
        if self.head_dim is None:
            if self.dim % self.n_heads:
                sizes = f"dim {self.dim} is not divisible by n_heads {self.n_heads}"
                raise ConfigError(f"{sizes}: change one of them, or set head_dim")
            self.head_dim = self.dim // self.n_heads
        if self.n_heads % self.n_kv_heads:
            sizes = f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}"
            raise ConfigError(f"{sizes}: change one of them")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd: change dim, n_heads or head_dim")
        if self.hidden_dim is None:
            two_thirds = int(2 * (4 * self.dim) / 3)
            self.hidden_dim = -(-two_thirds // self.multiple_of) * self.multiple_of
        self._check_experts()
        if self.dropout >= 1:
            raise ConfigError(f"dropout must be below 1, not {self.dropout!r}")
        for name in ("norm_eps", "rope_theta"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)!r}")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            self.rope_scaling = RopeScaling(**self.rope_scaling)  # a dict, from a file

    def _check_experts(self) -> None:
        """Set moe_hidden_dim of experts. Raise ConfigError if a setting of experts cannot work."""
        if not self.use_moe:
            for name in EXPERTS:
                if getattr(self, name) != getattr(LMConfig, name):
                    raise ConfigError(f"{name} needs experts: set use_moe too")
            return
        self.moe_hidden_dim = self.moe_hidden_dim or self.hidden_dim
        if self.num_experts_per_tok > self.n_routed_experts:
            sizes = f"num_experts_per_tok {self.num_experts_per_tok} is larger than"
            raise ConfigError(f"{sizes} n_routed_experts {self.n_routed_experts}: change one")

    def _check_type(self, name: str, kind: type) -> None:
        """Raise ConfigError if the field's value has the wrong type or is no valid size."""
        value = getattr(self, name)
        if kind is int or (kind == int | None and value is not None):
            least = 0 if name == "n_shared_experts" else 1
            if type(value) is not int or not least <= value <= LARGEST:
                limits = f"a whole number, at least {least} and at most {LARGEST:,}"
                raise ConfigError(f"{name} must be {limits}, not {value!r}")
        elif kind is float:
            if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
                raise ConfigError(f"{name} must be at least 0 and finite, not {value!r}")
        elif kind is bool and type(value) is not bool:
            raise ConfigError(f"{name} must be true or false, not {value!r}")

    def to_dict(self) -> dict:
        values = asdict(self)
        left_out = () if self.use_moe else ("use_moe", *EXPERTS)
        left_out += () if self.qk_norm else ("qk_norm",)  # as older versions stored it
        return {name: value for name, value in values.items() if name not in left_out}

    def shape(self) -> dict:
        """Return the fields that trained weights depend on: all except HOW_IT_COMPUTES."""
        return {k: v for k, v in self.to_dict().items() if k not in HOW_IT_COMPUTES}

    @classmethod
    def from_dict(cls, values: dict) -> "LMConfig":
        """Build a config from fields by name. Raises ConfigError if one is unknown or invalid."""
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ConfigError(f"unknown model settings: {', '.join(sorted(unknown))}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"model settings of the wrong type: {error}") from error
