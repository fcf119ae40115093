"""The shape of the model: every number that decides how many parameters there are."""

import sys
from dataclasses import asdict, dataclass, field, fields

HOW_IT_COMPUTES = ("dropout", "use_flash_attn")  # fields of LMConfig that weights do not depend on
LARGEST = 1 << 24  # of any size; a table of so many rows fits into memory


class ConfigError(ValueError):
    """A model shape that cannot be built; the message names the field and its value."""


def setting(default, help_text: str, must=None, **metadata):
    """A dataclass field whose help text also becomes the command-line flag's help; `must` says what
    values it may have."""
    return field(default=default, metadata={"help": help_text, "must": must, **metadata})


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3 stretches its rotary positions, see `rotary_frequencies`. Raises ConfigError."""

    factor: float  # by which slow rotations are slowed down
    low_freq_factor: float  # turns in the original context up to which they are slow
    high_freq_factor: float  # and from which they are fast, and left as they are
    original_max_seq_len: int

    def __post_init__(self):
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise ConfigError(f"rope_scaling: {name} must be positive, not {value!r}")


@dataclass
class LMConfig:
    """Shape of a Llama-style decoder.

    `hidden_dim` left at None becomes 2/3 of 4·dim rounded up to `multiple_of`, as in Llama's
    release. `head_dim` left at None becomes dim / n_heads.

    Raises ConfigError: a size that is not positive, or sizes that do not divide each other.
    """

    dim: int = setting(512, "width of the residual stream")
    n_layers: int = setting(8, "transformer blocks")
    n_heads: int = setting(8, "query heads; dim must be divisible by it, or head_dim be given")
    n_kv_heads: int = setting(2, "key/value heads, shared by query heads (grouped-query attention)")
    vocab_size: int = setting(6400, "pieces in the vocabulary", flag=False)  # comes with the data
    head_dim: int | None = setting(None, "channels of a head, even (default: dim / n_heads)")
    hidden_dim: int | None = setting(None, "inner width of the feed-forward (default: from dim)")
    multiple_of: int = setting(64, "hidden_dim computed from dim is rounded up to this")
    norm_eps: float = setting(1e-5, "added to the mean square in RMSNorm")
    rope_theta: float = setting(1e6, "base of the rotary frequencies")
    rope_scaling: RopeScaling | None = setting(  # noqa: RUF009  (a field); comes with weights
        None, "Llama 3's scaling of rotary frequencies", flag=False
    )
    max_seq_len: int = setting(512, "tokens per training sequence, and the context length")
    dropout: float = setting(0.0, "dropout after embedding, attention and feed-forward")
    tie_embeddings: bool = setting(True, "share the matrix of input embedding and output layer")
    use_flash_attn: bool = setting(
        True,
        "fast attention: PyTorch's fused kernels on a GPU, blocks of rows on a CPU; without it, "
        "plain matrix products and softmax over all T × T scores",
    )

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is int or (item.type == int | None and value is not None):
                if type(value) is not int or not 0 < value <= LARGEST:
                    limits = f"a positive whole number, at most {LARGEST:,}"
                    raise ConfigError(f"{item.name} must be {limits}, not {value!r}")
            elif item.type is float:
                if type(value) not in (int, float) or abs(value) > sys.float_info.max:
                    raise ConfigError(f"{item.name} must be a number, not {value!r}")
            elif item.type is bool and type(value) is not bool:
                raise ConfigError(f"{item.name} must be true or false, not {value!r}")
        if self.head_dim is None:
            if self.dim % self.n_heads:
                sizes = f"dim {self.dim} is not divisible by n_heads {self.n_heads}"
                raise ConfigError(f"{sizes}: change either, or give head_dim")
            self.head_dim = self.dim // self.n_heads
        if self.n_heads % self.n_kv_heads:
            sizes = f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}"
            raise ConfigError(sizes)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} must be even, for rotary embedding")
        if self.hidden_dim is None:
            two_thirds = int(2 * (4 * self.dim) / 3)
            self.hidden_dim = -(-two_thirds // self.multiple_of) * self.multiple_of
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, not {self.dropout!r}")
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be positive and finite, not {value!r}")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            self.rope_scaling = RopeScaling(**self.rope_scaling)  # as it stands in a file

    def to_dict(self) -> dict:
        return asdict(self)

    def shape(self) -> dict:
        """The fields that belong to trained weights; HOW_IT_COMPUTES may be others each time."""
        return {name: value for name, value in asdict(self).items() if name not in HOW_IT_COMPUTES}

    @classmethod
    def from_dict(cls, values: dict) -> "LMConfig":
        """Inverse of `to_dict`. Raises ConfigError: a field that this version does not know, or a
        value that cannot be right."""
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ConfigError(f"unknown model settings: {', '.join(sorted(unknown))}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"model settings of the wrong type: {error}") from error
