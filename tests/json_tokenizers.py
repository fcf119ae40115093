"""Write small tokenizers like those of SmolLM2 and Llama 3: a tokenizer.json with byte-level BPE,
and a tokenizer_config.json."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

# The pattern of Llama-3.2-1B, and the markers of SmolLM2-135M and Llama-3.2-1B.
LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKERS = {  # kind → beginning of text, end of text, some of the other markers
    "smollm2": ("<|endoftext|>", "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]),
    "llama3": ("<|begin_of_text|>", "<|end_of_text|>", ["<|eot_id|>", "<|start_header_id|>"]),
}


def write_tokenizer(
    folder: Path, kind: str, texts: list[str], vocab_size: int = 400, names: tuple[str, ...] = ()
) -> Path:
    """Train a tokenizer on the texts and write its files; `kind` is one of MARKERS. `names` are
    added as tokens that text may contain, as in MiniMind's tokenizer."""
    begin, end, others = MARKERS[kind]
    special = list(dict.fromkeys([begin, end, *others]))
    smol = kind == "smollm2"  # SmolLM2's markers have the first ids, Llama's the last
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.Split(tokenizers.Regex(LLAMA_3_PATTERN), "isolated")
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=smol)
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=not smol))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits if smol else words, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(names) - (0 if smol else len(special)),
        special_tokens=special if smol else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    if kind == "llama3":
        known = [(begin, tokenizer.token_to_id(begin))]
        template = processors.TemplateProcessing(single=[begin, "$A"], special_tokens=known)
        tokenizer.post_processor = template
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    config = {
        "bos_token": begin,  # real files use both forms: a string and a dictionary
        "eos_token": {"__type": "AddedToken", "content": end, "special": True} | flags,
        "tokenizer_class": "GPT2Tokenizer" if kind == "smollm2" else "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
