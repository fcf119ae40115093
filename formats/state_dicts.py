"""Weights of others: Hugging Face's Llama folders, and state dicts of Meta, llama2.c and MiniMind.

Nothing here runs code from a file: safetensors, JSON, and torch.load with weights_only.
"""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from formats.hugging_face_names import (
    OUTER,
    config_from_llama,
    join_halves,
    our_names,
    our_rotation,
    rotated_heads,
)
from formats.portable import CONFIG_FILE, WEIGHTS_FILE, TensorFile, read_json, require_fit
from model.config import ConfigError, LMConfig
from model.transformer import Transformer

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt")
HF_FILES = (WEIGHTS_FILE, "pytorch_model.bin")  # each also as shards with an index
WRAPPERS = ("model", "state_dict", "model_state_dict")  # keys of the weights in a training file
ARGUMENTS = ("model_args", "args", "config")  # keys of the model's shape
PREFIX = re.compile(r"^(module\.|_orig_mod\.)+")  # of DistributedDataParallel and torch.compile
# Tables that are computed and not learned.
TABLES = ("freqs_cis", "freqs_cos", "freqs_sin", "freqs", "pos_cis", "inv_freq", "mask")
# What shapes do not tell. n_heads has no default: every number of heads fits the same matrices.
DEFAULTS = {"norm_eps": 1e-5, "rope_theta": 10000.0, "max_seq_len": 2048}  # Llama 1 and 2
SETTINGS = ("n_heads", *DEFAULTS)


@dataclass
class Foreign:
    """Weights of others, and what stands beside them."""

    weights: Mapping[str, Tensor]  # of a Hugging Face folder under our names, else as they came
    llama: LMConfig | None  # of a Hugging Face folder
    settings: dict  # those of SETTINGS that the files give


def read_foreign(source: Path) -> Foreign:
    """Read a Hugging Face folder, Meta's folder (params.json, consolidated.00.pth) or one weights
    file. Raises ConfigError: nothing of the kind, damaged, or a model with other arithmetic."""
    if source.is_file():
        return read_state_dict(source)
    if (source / CONFIG_FILE).exists():
        llama = read_llama_config(source)
        given = {name: getattr(llama, name) for name in SETTINGS}
        return Foreign(LlamaTensors(source), llama, given)
    parts = sorted(source.glob("consolidated.*.pth"))
    if len(parts) > 1:
        raise ConfigError(
            f"{source} is cut into {len(parts)} parts for model parallelism: import the model's "
            "Hugging Face folder"
        )
    if parts:
        return read_state_dict(parts[0])
    raise ConfigError(
        f"{source} has neither {CONFIG_FILE} (Hugging Face) nor consolidated.00.pth (Meta): give "
        "such a folder, or a .pth or .safetensors file"
    )


def read_llama_config(folder: Path) -> LMConfig:
    """Return the shape of the model in a Hugging Face folder. Raises ConfigError: none, or one with
    other arithmetic."""
    values = read_json(folder / CONFIG_FILE)
    if "model_type" not in values:
        raise ConfigError(f"{folder} is no Hugging Face folder: no model_type in {CONFIG_FILE}")
    try:
        return config_from_llama(values)
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG_FILE}: {error}") from error


def hf_files(folder: Path) -> list[Path]:
    """List the weights files: model.safetensors or pytorch_model.bin, whole or in shards with an
    index. Raises ConfigError: neither is there."""
    for name in HF_FILES:
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
                raise ConfigError(f"{index}: no weight_map")
            return [folder / Path(shard).name for shard in sorted(set(shards.values()))]
    raise ConfigError(f"{folder}: no weights ({' or '.join(HF_FILES)})")


class LlamaTensors(Mapping):
    """The weights of a Hugging Face folder by our names, each read when it is asked for.

    They lie as in formats.portable, in the precision of the file. Raises ConfigError: no Llama, or
    a file that is missing or damaged.
    """

    def __init__(self, folder: Path):
        self._config = read_llama_config(folder)
        self._weights = ChainMap(*map(read_tensors, hf_files(folder)))
        names = (name for name in self._weights if name.rpartition(".")[2] not in TABLES)
        self._theirs = our_names({name: name for name in names}, str(folder))

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[self._theirs[name]]
        heads = rotated_heads(name, self._config)
        if heads and weight.shape[:1] == (heads * self._config.head_dim,):
            return join_halves(weight, heads)
        return weight  # of the wrong shape too: `require_fit` names it

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)


def read_tensors(path: Path) -> Mapping:
    """Return what a weights file holds; tensors of safetensors are read when they are asked for.
    Raises ConfigError: missing, damaged, of another kind, or more than tensors and plain values."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file")
    if path.suffix not in (".safetensors", *TORCH_SUFFIXES):
        raise ConfigError(f"{path}: neither .safetensors nor {', '.join(TORCH_SUFFIXES)}")
    try:
        if path.suffix == ".safetensors":
            return TensorFile(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except SafetensorError as error:
        raise ConfigError(f"{path}: damaged ({error})") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise ConfigError(
            f"{path}: damaged, or it holds more than tensors, which could run code when loaded"
        ) from error


def unwrap(content: object, path: Path) -> tuple[dict[str, Tensor], dict]:
    """Return the state dict itself, without prefixes and tables, and the arguments beside it.
    Raises ConfigError: something in it is no tensor of floating point numbers."""
    found = {}
    if isinstance(content, dict):
        found = next((content[k] for k in ARGUMENTS if isinstance(content.get(k), dict)), {})
        content = next((content[k] for k in WRAPPERS if isinstance(content.get(k), dict)), content)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: no state dict")
    weights = {PREFIX.sub("", str(name)): tensor for name, tensor in content.items()}
    weights = {n: t for n, t in weights.items() if n.rpartition(".")[2] not in TABLES}
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise ConfigError(f"{path}: {name} is no tensor of floating point numbers")
    return weights, found


def read_state_dict(path: Path) -> Foreign:
    """Read one file; settings come from params.json beside it, or from the arguments inside.
    Raises ConfigError: see `read_tensors` and `unwrap`, or settings that cannot be used."""
    weights, settings = unwrap(read_tensors(path), path)
    if (params := path.with_name("params.json")).exists():
        settings = settings | read_json(params)
    if settings.get("use_scaled_rope"):
        raise ConfigError(
            f"{params}: use_scaled_rope does not say by how much (8 in Llama 3.1, 32 in 3.2): "
            "import the model's Hugging Face folder, whose config.json does"
        )
    settings = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
    for name, value in settings.items():
        if type(value) not in (int, float):
            raise ConfigError(f"{path}: {name} must be a number, not {value!r}")
    return Foreign(weights, None, settings)


def to_ours(foreign: Foreign, settings: dict, source: str) -> tuple[LMConfig, dict[str, Tensor]]:
    """Return the config, with all of SETTINGS as in `settings`, and fp32 weights by our names.
    Raises ConfigError: weights that are missing, superfluous, or of another shape."""
    weights, config = foreign.weights, foreign.llama
    theirs = config is None and any(name in weights for name in OUTER.values())
    if theirs:
        weights = our_names(weights, source)
    try:
        if config:
            config = LMConfig.from_dict(config.to_dict() | settings)
        else:
            config = config_from_shapes(weights, settings)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    with torch.device("meta"):  # shapes without memory
        require_fit(Transformer(config), weights, source)
    if config.tie_embeddings and "output.weight" in weights:
        if not torch.equal(weights["output.weight"], weights["tok_embeddings.weight"]):
            raise ConfigError(f"{source}: says that the embeddings are tied, but they differ")
        weights = {name: w for name, w in weights.items() if name != "output.weight"}
    if theirs:
        weights = our_rotation(config, weights)
    return config, {name: weight.float() for name, weight in weights.items()}


def config_from_shapes(weights: dict[str, Tensor], settings: dict) -> LMConfig:
    """Return the shape of the model with these weights (our names). Raises ConfigError: a weight
    that tells it is missing, or `n_heads` does not fit."""
    in_block = ("attention.wq", "attention.wk", "feed_forward.w1")
    needed = ["tok_embeddings.weight", *(f"layers.0.{name}.weight" for name in in_block)]
    for name in needed:
        if name not in weights or weights[name].dim() != 2:
            raise ConfigError(f"{name} is missing or no matrix: not a Llama")
    embedding, wq, wk, w1 = (weights[name] for name in needed)
    n_heads = settings["n_heads"]
    if type(n_heads) is not int or n_heads < 1 or wq.shape[0] % n_heads:
        raise ConfigError(f"{n_heads} heads do not divide a width of {wq.shape[0]}")
    head_dim = wq.shape[0] // n_heads
    output = weights.get("output.weight")
    layers = {int(n.split(".")[1]) for n in weights if re.match(r"layers\.\d+\.", n)}
    return LMConfig(
        dim=embedding.shape[1],
        n_layers=len(layers),
        n_kv_heads=max(1, wk.shape[0] // head_dim),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        hidden_dim=w1.shape[0],
        tie_embeddings=output is None or torch.equal(output, embedding),
        **settings,
    )
