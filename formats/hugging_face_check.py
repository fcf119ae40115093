"""What transformers makes of an exported folder, held against the model and tokenizer here."""

import random
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import UsageError
from data.tokenizer import JsonTokenizer, Tokenizer
from model.transformer import Transformer

TOLERANCE = 1e-5  # of logits in fp32, or this share of the largest one where that is above 1
CHECKED_TOKENS = 256  # sequence length of the logits compared
RANDOM_TEXTS = 2000

# What readers of tokenizers stumble over; the check adds random strings of pieces.
NASTY_TEXTS = (
    "",
    " ",
    "   a  b     c      ",
    "\tif x:\n\t\treturn\t",
    "\n\na\n\n\nb\n",
    "a\r\nb\r\n\r\r\n",
    "第1句:你好,世界。「龘」",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "e\u0301 n\u0303 é Å A\u030a ﬁ ① ½",
    "שלום مرحبا 한국어",
    "<s>",
    "a</s>b<unk>",
    "<0x41><0x0A>",
    "\u2581\u2581a\u2581 \u2581 b \u2581",
    "\0a\0\0b\0",
    "\ufeffa\ufffd\uffff\U0010ffff",
    "".join(map(chr, range(256))),
    "a" * 1000,
    " " * 1000,
)


def check(folder: Path, model: Transformer, tokenizer: Tokenizer | None, dtype: str) -> list[str]:
    """Load the folder as anybody would, and compare with what was exported (None: no tokenizer),
    the weights in `dtype`; says how equal it is. Raises UsageError: something differs."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    said = [check_model(folder, model, dtype)]
    if tokenizer is not None:
        said.append(check_tokenizer(folder, tokenizer))
    return [f"  transformers {transformers.__version__}: {line}" for line in said]


def check_model(folder: Path, model: Transformer, dtype: str) -> str:
    """Logits of AutoModelForCausalLM on the folder against ours, both computing in fp32 with the
    weights as they were stored, which `model` is left with; says how far apart. Raises UsageError:
    further than TOLERANCE."""
    kind = getattr(torch, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    if loaded.dtype != kind:
        raise UsageError(f"check failed: transformers reads the weights as {loaded.dtype}")
    length = min(model.config.max_seq_len, CHECKED_TOKENS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (2, length), generator=generator)
    with torch.inference_mode():
        exact = model(tokens).logits
        for parameter in model.parameters():
            parameter.copy_(parameter.to(kind))
        ours, theirs = model(tokens).logits, loaded.float()(tokens).logits
    difference, largest = (ours - theirs).abs().max().item(), ours.abs().max().item()
    if not difference <= TOLERANCE * max(1, largest):
        raise UsageError(f"check failed: logits differ from transformers' by {difference:.1e}")
    said = f"logits of 2 × {length} tokens, up to {largest:.0f}, differ by {difference:.1e} at most"
    if dtype != "float32":
        said += f" in fp32; {dtype} itself moved them by up to {(ours - exact).abs().max():.1e}"
    return said


def check_tokenizer(folder: Path, tokenizer: Tokenizer) -> str:
    """What AutoTokenizer makes of the folder against ours, on many texts; says how many. Raises
    UsageError: ids or decoded text differ."""
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chooser, copied = random.Random(0), isinstance(tokenizer, JsonTokenizer)
    ids = range(tokenizer.vocab_size)
    texts = list(NASTY_TEXTS)
    texts += [tokenizer.decode(chooser.choices(ids, k=20)) for _ in range(RANDOM_TEXTS)]
    for text, ours in zip(texts, tokenizer.encode_batch(texts), strict=True):
        theirs = loaded(text, add_special_tokens=False)["input_ids"]
        back = loaded.decode(ours, skip_special_tokens=True)
        if theirs != ours or back != tokenizer.decode(ours):
            raise UsageError(f"check failed: transformers' tokenizer differs on {text[:40]!r}")
        # A tokenizer.json of others begins a text as it likes.
        if not copied and loaded(text)["input_ids"] != [tokenizer.bos_id, *ours]:
            raise UsageError(f"check failed: no begin marker before {text[:40]!r}")
    return f"token ids and decoded text equal on {len(texts):,} texts"
