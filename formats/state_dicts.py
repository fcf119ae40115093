"""Weights that others have written, read as they lie: Hugging Face's Llama folders, and state dicts
in .pth files as Meta's, llama2.c's and MiniMind's.

Nothing here can run code that a file brings along: safetensors, JSON, and torch.load with
weights_only.
"""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from formats.hugging_face_names import (
    OUTER,
    config_from_llama,
    join_halves,
    our_names,
    our_rotation,
    rotated_heads,
)
from formats.portable import CONFIG_FILE, WEIGHTS_FILE, TensorFile, load_weights, read_json
from model.config import ConfigError, LMConfig
from model.transformer import Transformer

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt")
HF_FILES = (WEIGHTS_FILE, "pytorch_model.bin")  # each also as shards with an index
WRAPPERS = ("model", "state_dict", "model_state_dict")  # keys that others put the weights under
ARGUMENTS = ("model_args", "args", "config")  # and the shape
PREFIX = re.compile(r"^(module\.|_orig_mod\.)+")  # of DistributedDataParallel and torch.compile
# Tables that are computed and not learned.
TABLES = ("freqs_cis", "freqs_cos", "freqs_sin", "freqs", "pos_cis", "inv_freq", "mask")
# What shapes do not tell. n_heads has no default: every number of heads fits the same matrices.
DEFAULTS = {"norm_eps": 1e-5, "rope_theta": 10000.0, "max_seq_len": 2048}  # Llama 1 and 2
SETTINGS = ("n_heads", *DEFAULTS)


@dataclass
class Foreign:
    """Weights under the names they came with, and what stands beside them."""

    weights: dict[str, Tensor]
    llama: LMConfig | None  # of a Hugging Face folder
    settings: dict  # those of SETTINGS that the files give


def read_foreign(source: Path) -> Foreign:
    """A Hugging Face folder, Meta's folder (params.json, consolidated.*.pth) or one weights file.
    Raises ConfigError: nothing of the kind, damaged, or a model with other arithmetic."""
    if source.is_file():
        return read_state_dicts([source])
    if (source / CONFIG_FILE).exists():
        llama = read_llama_config(source)
        given = {name: getattr(llama, name) for name in SETTINGS}
        return Foreign(read_hf_weights(source), llama, given)
    if shards := sorted(source.glob("consolidated.*.pth")):
        return read_state_dicts(shards)
    raise ConfigError(
        f"{source} has neither {CONFIG_FILE} (Hugging Face) nor consolidated.00.pth (Meta): give "
        "such a folder, or a .pth or .safetensors file"
    )


def read_llama_config(folder: Path) -> LMConfig:
    """The shape of the model in a Hugging Face folder. Raises ConfigError: none, or one with other
    arithmetic."""
    values = read_json(folder / CONFIG_FILE)
    if "model_type" not in values:
        raise ConfigError(f"{folder} is no Hugging Face folder: no model_type in {CONFIG_FILE}")
    try:
        return config_from_llama(values)
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG_FILE}: {error}") from error


def read_hf_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face folder, all of them, under the names that they have there."""
    weights = {}
    for path in hf_files(folder):
        weights |= unwrap(read_tensors(path), path)[0]
    return weights


def hf_files(folder: Path) -> list[Path]:
    """model.safetensors or pytorch_model.bin, whole or in shards with an index. Raises ConfigError:
    neither is there."""
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
    """Of a Hugging Face folder: name (ours) → weight as formats.portable has it, but for its
    precision, read each time that it is asked for. Raises ConfigError: no Llama, or not in
    safetensors. SafetensorError, OSError: a file that cannot be read."""

    def __init__(self, folder: Path):
        self._config, files = read_llama_config(folder), hf_files(folder)
        if any(path.suffix != ".safetensors" for path in files):
            raise ConfigError(
                f"{folder} has no safetensors: python -m scripts.import_weights {folder} OUT reads "
                "it and writes some"
            )
        self._weights = ChainMap(*map(TensorFile, files))
        names = (name for name in self._weights if name.rpartition(".")[2] not in TABLES)
        try:
            self._theirs = our_names({name: name for name in names})
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[self._theirs[name]]
        heads = rotated_heads(name, self._config)
        if heads and weight.shape[:1] == (heads * self._config.head_dim,):
            return join_halves(weight, heads)
        return weight  # as it is, too, where it does not fit the config: `require_fit` names it

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)


def read_tensors(path: Path) -> dict:
    """What a weights file holds. Raises ConfigError: missing, damaged, of another kind, or with
    more than tensors and plain values."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix not in TORCH_SUFFIXES:
            raise ConfigError(f"{path}: neither .safetensors nor {', '.join(TORCH_SUFFIXES)}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (ConfigError, MemoryError):
        raise
    except SafetensorError as error:
        raise ConfigError(f"{path}: damaged ({error})") from error
    except Exception as error:  # a damaged pickle can raise anything
        if foreign_class := re.search(r"GLOBAL (\S+)", str(error)):
            reason = f"holds {foreign_class[1]} besides tensors, and loading that could run code"
        else:
            reason = "not a file of torch.save, or damaged"
        raise ConfigError(f"{path}: {reason}") from error


def unwrap(content: object, path: Path) -> tuple[dict[str, Tensor], dict]:
    """The state dict itself, without prefixes and tables, and the arguments saved beside it."""
    found = {}
    if isinstance(content, dict):
        found = next((content[k] for k in ARGUMENTS if isinstance(content.get(k), dict)), {})
        content = next((content[k] for k in WRAPPERS if isinstance(content.get(k), dict)), content)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: no state dict")
    weights = {PREFIX.sub("", str(name)): tensor for name, tensor in content.items()}
    weights = {n: t for n, t in weights.items() if n.rpartition(".")[2] not in TABLES}
    for name, tensor in weights.items():
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        if not plain or not tensor.is_floating_point():
            kind = str(tensor.dtype) if plain else type(tensor).__name__
            raise ConfigError(f"{path}: {name} is {kind}, not a tensor of floating point numbers")
    return weights, found


def read_state_dicts(paths: list[Path]) -> Foreign:
    """One file, or the shards of Meta's model parallelism; settings from params.json beside them,
    or from the arguments in the file."""
    parts, settings = [], {}
    for path in paths:
        weights, found = unwrap(read_tensors(path), path)
        parts.append(weights)
        settings |= found
    if (params := paths[0].with_name("params.json")).exists():
        settings |= read_json(params)
    if settings.get("use_scaled_rope"):
        raise ConfigError(
            f"{params}: use_scaled_rope does not say by how much (8 in Llama 3.1, 32 in 3.2): "
            "import the model's Hugging Face folder, whose config.json does"
        )
    weights = parts[0] if len(parts) == 1 else merge_shards(parts, paths[0].parent)
    settings = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
    for name, value in settings.items():
        if type(value) not in (int, float):
            raise ConfigError(f"{paths[0]}: {name} must be a number, not {value!r}")
    return Foreign(weights, None, settings)


def merge_shards(parts: list[dict[str, Tensor]], folder: Path) -> dict[str, Tensor]:
    """Put together what Meta's model parallelism has cut: layers that write into the residual
    stream along their input, the others along their output, the embedding along its width (Llama 1
    and 2) or along the vocabulary (Llama 3).

    Raises ConfigError: shards that do not hold the same weights.
    """
    if any(part.keys() != parts[0].keys() for part in parts) or "norm.weight" not in parts[0]:
        raise ConfigError(f"{folder}: the consolidated.*.pth files are not shards of one model")
    dim, merged = parts[0]["norm.weight"].numel(), {}
    for name, first in parts[0].items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if first.dim() == 1:
            merged[name] = first  # norms: every shard has all of it
            continue
        along_input = kind in ("wo", "w2") or (kind == "tok_embeddings" and first.shape[1] < dim)
        try:
            merged[name] = torch.cat([part[name] for part in parts], dim=1 if along_input else 0)
        except RuntimeError as error:
            raise ConfigError(f"{folder}: the shards of {name} do not fit together") from error
    return merged


def to_ours(foreign: Foreign, settings: dict, source: str) -> tuple[LMConfig, dict[str, Tensor]]:
    """Config, with every one of SETTINGS as in `settings`, and fp32 weights, as formats.portable
    stores them. Raises ConfigError: weights that are missing, superfluous, or of another shape."""
    weights, config = foreign.weights, foreign.llama
    theirs = config is not None or any(name in weights for name in OUTER.values())
    try:
        if theirs:
            weights = our_names(weights)
        if config:
            config = LMConfig.from_dict(config.to_dict() | settings)
        else:
            config = config_from_shapes(weights, settings)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    with torch.device("meta"):  # shapes without memory
        load_weights(Transformer(config), weights, source)
    if config.tie_embeddings and "output.weight" in weights:
        if not torch.equal(weights["output.weight"], weights["tok_embeddings.weight"]):
            raise ConfigError(f"{source}: says that the embeddings are tied, but they differ")
        weights = {name: w for name, w in weights.items() if name != "output.weight"}
    if theirs:
        weights = our_rotation(config, weights)
    return config, {name: weight.float() for name, weight in weights.items()}


def config_from_shapes(weights: dict[str, Tensor], settings: dict) -> LMConfig:
    """The shape of the model that has these weights (our names). Raises ConfigError: a weight that
    says it is missing."""
    needed = ["tok_embeddings.weight"]
    in_block = ("attention.wq", "attention.wk", "feed_forward.w1")
    needed += [f"layers.0.{name}.weight" for name in in_block]
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
