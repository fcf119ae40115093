"""Import a Llama: a Hugging Face folder, or a state dict with our or Hugging Face's names.

No code from a file is run: the readers are safetensors, JSON and torch.load(weights_only=True).
"""

from pathlib import Path

import torch
from torch import Tensor

from lm.common.atomic import new_folder
from lm.common.errors import UsageError
from lm.data.chat_template import PLAIN_JINJA, TEMPLATE_FILE
from lm.data.tokenizer import (
    MARKERS_FILE,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    copy_tokenizer,
    open_tokenizer,
    tokenizer_in,
)
from lm.formats.config_json import read_config_json
from lm.formats.hugging_face import read_hugging_face
from lm.formats.portable import (
    CONFIG_FILE,
    GENERATION_FILE,
    WEIGHTS_FILE,
    build_config,
    end_ids,
    has_setting,
    load_tensors,
    read_json,
    require_fit,
    save_portable,
    without_memory,
    write_json,
)
from lm.formats.tokenizer_json import is_ours, restore
from lm.formats.weight_layout import THEIR_ORDER, our_weights, reordered
from model.config import LMConfig

# These settings do not follow from the weights. Defaults in Meta's code of Llama 1 and 2:
DEFAULTS = {"norm_eps": 1e-5, "rope_theta": 10000.0, "max_seq_len": 2048}
NORMED = {"norm_eps": 1e-6, "rope_theta": 1e6}  # of models with norms of queries and keys: Qwen3's
EXPERTS = {"norm_topk_prob": True}  # MiniMind's


def is_import(folder: Path) -> bool:
    """Return True for a folder of portable weights, perhaps with tokenizer and chat template."""
    known = {CONFIG_FILE, GENERATION_FILE, WEIGHTS_FILE, TEMPLATE_FILE, *TOKENIZER_FILES}
    others = {path.name for path in folder.iterdir()} - known
    return not others and has_setting("n_layers", folder)


def import_weights(
    source: Path, out: Path, *, tokenizer: Path | None = None, overwrite: bool = False, **flags
) -> str:
    """Convert weights of another program to portable weights; return a summary for the user.

    Args:
        tokenizer: file or folder of a tokenizer; None: the one next to the weights, if any.
        flags: `n_heads`, `num_experts_per_tok` and the keys of DEFAULTS; None means not given. They
            must not contradict `source`, except max_seq_len.

    Raises UsageError if the files or settings cannot be used, or if `out` must not be replaced."""
    given = {name: value for name, value in flags.items() if value is not None}
    with new_folder(out, "import", is_import, overwrite) as folder:
        if source.is_dir():
            said, weights = read_config_json(source).to_dict(), read_hugging_face(source)
        else:
            content, said = _state_dict(source)
            weights = our_weights(content.items(), str(source))
        for name in said.keys() & given.keys() - {"max_seq_len"}:
            if said[name] != given[name]:
                raise UsageError(f"drop --{name}: the settings of {source} say {said[name]}")
        settings, assumed = said | given, {}
        if source.is_dir():
            config = build_config(settings, source)
        else:
            assumed = DEFAULTS | (NORMED if any("q_norm" in name for name in weights) else {})
            assumed |= EXPERTS if any(".experts." in name for name in content) else {}
            config = _config_from_shapes(weights, assumed | settings, source)
            if any(".self_attn." in name for name in content):  # Hugging Face's names
                weights = {x: reordered(config, x, weights[x], THEIR_ORDER) for x in weights}
        require_fit(without_memory(config), weights, str(source))
        names = weights.keys() - ({"output.weight"} if config.tie_embeddings else set())
        save_portable(folder, config, {name: weights[name].float() for name in sorted(names)})
        path = tokenizer_in(tokenizer or (source if source.is_dir() else source.parent))
        copied = "no tokenizer (to use text, pass --tokenizer FILE)"
        if tokenizer or path.exists():
            copied = f"tokenizer {path}"
            if not restore(path, folder / TOKENIZER_FILE):
                copy_tokenizer(open_tokenizer(path).path, folder)
        copied += _copy_template(source, path.parent, folder)
        if ends := end_ids(source):
            write_json(folder / GENERATION_FILE, {"eos_token_id": sorted(ends)})
    shown = (
        f"{name} {getattr(config, name):g}{' (assumed)' * (name in assumed.keys() - settings)}"
        for name in ("n_heads", *DEFAULTS, *(EXPERTS if config.use_moe else ()))
    )
    return f"{out}: weights of {source}, {copied}\n{', '.join(shown)}"


def _copy_template(source: Path, beside: Path, folder: Path) -> str:
    """Copy the chat template in the folder `source`; if there is none, the one in `beside`, the
    folder of the tokenizer. Return words for the user if it cannot be used, else ""."""
    template = _template(source) or _template(beside) or ""
    if is_ours(template):
        (folder / TEMPLATE_FILE).write_text(f"{PLAIN_JINJA}\n", encoding="utf-8")
    elif template:
        if not (folder / TOKENIZER_JSON).exists():
            return ", without its chat template, which needs a tokenizer.json of byte-level BPE"
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        names = read_json(beside / MARKERS_FILE).items()  # which templates may use
        tokens = {name: token for name, token in names if name.endswith("_token") and token}
        write_json(folder / MARKERS_FILE, tokens)
    return ""


def _template(folder: Path) -> str | None:
    """Return the chat template in a folder, if any; of several, the default."""
    if (file := folder / TEMPLATE_FILE).exists():  # newer versions of transformers write it
        return file.read_text(encoding="utf-8")
    markers = folder / MARKERS_FILE
    found = read_json(markers).get("chat_template") if markers.exists() else None
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}.get("default")
    return found


def _state_dict(path: Path) -> tuple[dict, dict]:
    """Return the state dict in a file, and the settings in the file or in Meta's params.json next
    to the file. Raises UsageError if a file cannot be used."""
    content = load_tensors(path)
    beside = path.with_name("params.json")
    said = read_json(beside) if beside.exists() else {}
    if isinstance(content.get("model"), dict):  # a training checkpoint, as in llama2.c
        said |= content.get("model_args") or {}
        content = content["model"]
    if said.get("use_scaled_rope"):
        raise UsageError(f"{path}: use_scaled_rope is set: import the Hugging Face folder")
    return content, {name: said[name] for name in ("n_heads", *DEFAULTS) if name in said}


def _config_from_shapes(weights: dict[str, Tensor], settings: dict, path: Path) -> LMConfig:
    """Return a config from shapes and `settings`. Raises UsageError if they fit no Llama."""
    router = weights.get("layers.0.feed_forward.router")
    w1 = "feed_forward.w1.weight" if router is None else "feed_forward.w1"  # (experts, rows, cols)
    in_block = (f"layers.0.{name}" for name in ("attention.wq.weight", "attention.wk.weight", w1))
    found = [weights.get(name) for name in ("tok_embeddings.weight", *in_block)]
    if any(weight is None or weight.dim() < 2 for weight in found):
        raise UsageError(f"{path}: not a Llama: a matrix of its first layer is missing")
    embedding, wq, wk, w1 = found
    q_norm = weights.get("layers.0.attention.q_norm.weight")
    if q_norm is not None and 0 < q_norm.numel() < len(wq):  # else the heads are not separate
        settings = {"n_heads": len(wq) // q_norm.numel()} | settings
    if "n_heads" not in settings:
        raise UsageError(f"{path} does not say how many heads it has: pass --n_heads")
    n_heads = settings["n_heads"]
    if n_heads < 1 or wq.shape[0] % n_heads:
        raise UsageError(f"--n_heads {n_heads} does not divide the {wq.shape[0]} rows of wq")
    head_dim = wq.shape[0] // n_heads
    output = weights.get("output.weight")
    config = {
        "dim": embedding.shape[1],
        "n_layers": len({n.split(".")[1] for n in weights if n.startswith("layers.")}),
        "n_kv_heads": max(1, wk.shape[0] // head_dim),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "hidden_dim": w1.shape[-2],
        "qk_norm": q_norm is not None,
        "tie_embeddings": output is None or torch.equal(output, embedding),
    }
    if router is not None:
        if "num_experts_per_tok" not in settings:
            problem = f"{path} does not say how many experts a token uses"
            raise UsageError(f"{problem}: pass --num_experts_per_tok (minimind-3-moe has 1)")
        config |= {"use_moe": True, "n_routed_experts": len(router)}
        config["n_shared_experts"] = len(w1) - len(router)
    return build_config(config | settings, path)
