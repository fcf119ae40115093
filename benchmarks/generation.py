"""Compare the generation speed of this project with transformers' `generate`. Both decode
greedily with the same untrained weights, and take turns in one process.

    python -m benchmarks.generation --sizes 3m 26m

On a GPU this project is also measured without CUDA graphs (`lm.inference.decoder.record`).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from operator import truediv
from statistics import median

import torch
from torch import Tensor

from benchmarks.cli import heading, new_parser, table
from benchmarks.work import SIZES
from lm.common.errors import UsageError, one_line_errors
from lm.formats.config_json import config_json_of
from lm.formats.weight_layout import to_hugging_face
from lm.inference.decoder import Decoder
from lm.inference.generation import generate
from lm.inference.sampling import Sampling
from model import Transformer

PROGRAM = "benchmarks.generation"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT_TOKENS, NEW_TOKENS = 16, 128


def main(argv: list[str] | None = None) -> None:
    with one_line_errors(PROGRAM, UsageError):
        parser = new_parser(PROGRAM, __doc__)
        add = parser.add_argument
        add("--sizes", nargs="+", choices=SIZES, default=["3m", "26m"])
        add("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
        add("--batch_sizes", type=int, nargs="+", default=[1, 8], help="prompts continued together")
        add("--rounds", type=int, default=5, help="turns of each contender")
        args = parser.parse_args(argv)
        print(heading(PROGRAM, argv))
        print(f"\n{PROMPT_TOKENS} tokens of prompt, {NEW_TOKENS} new tokens, greedy\n", flush=True)
        rows = []
        for size, dtype, batch_size in product(args.sizes, args.dtypes, args.batch_sizes):
            prompts = torch.randint(3, SIZES[size].vocab_size, (batch_size, PROMPT_TOKENS))
            runs = contenders(untrained(size), dtype, prompts)
            row = {"model": size, "precision": dtype, "prompts": batch_size}
            rows.append(row | measure(runs, batch_size, args.rounds))
            print(*table(rows).splitlines()[-1 if len(rows) > 1 else 0 :], sep="\n", flush=True)


def untrained(size: str) -> Transformer:
    torch.manual_seed(0)
    config = replace(SIZES[size], seq_len=PROMPT_TOKENS + NEW_TOKENS).config
    return Transformer(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")


def llama_of(model: Transformer, dtype: str):
    """Return the same model as transformers' Llama, or with qk_norm its Qwen3."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_json_of(model.config, dtype, bos_id=1, eos_id=2))
    llama = AutoModelForCausalLM.from_config(config).eval()
    weights = to_hugging_face(model.config, {name: p.data for name, p in model.named_parameters()})
    lacking = llama.load_state_dict(weights, strict=False).missing_keys
    assert set(lacking) <= {"lm_head.weight"}  # tied to the embedding
    llama.tie_weights()
    return llama.to(next(model.parameters()).device, DTYPES[dtype])


def contenders(
    model: Transformer, dtype: str, prompts: Tensor
) -> dict[str, Callable[[], list[list[int]]]]:
    """Return name → function. The function continues the prompts, (B, T), greedily and returns the
    new ids."""
    llama = llama_of(model, dtype)
    prompts = prompts.to(llama.device)

    def ours(inputs: Decoder) -> Callable[[], list[list[int]]]:
        return lambda: generate(inputs, prompts.tolist(), NEW_TOKENS, Sampling(temperature=0))

    def theirs() -> list[list[int]]:
        ids = llama.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,  # never stop before the last token
            pad_token_id=0,
        )
        return ids[:, prompts.shape[1] :].tolist()

    found = {"ours": ours(Decoder(model, DTYPES[dtype])), "transformers": theirs}
    if llama.device.type == "cuda":
        found["ours, no graphs"] = ours(launched := Decoder(model, DTYPES[dtype]))
        launched.recorded = False
    return found


def measure(runs: dict[str, Callable], batch_size: int, rounds: int) -> dict[str, str]:
    """Return the cells of a row. A speed is the median of all rounds. A ratio is the median of
    the ratios of single rounds. Before the rounds, every contender runs once, untimed."""
    texts = {name: run() for name, run in runs.items()}
    speeds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            speeds[name].append(batch_size * NEW_TOKENS / (time.perf_counter() - started))
    ours = speeds.pop("ours")
    row = {"ours, tokens/s": f"{median(ours):,.0f}"}
    for name, others in speeds.items():
        row[name] = f"{median(others):,.0f}"
        row[f"ours / {name.removeprefix('ours, ')}"] = f"{median(map(truediv, ours, others)):.2f}"
    return row | {"same text": "yes" if texts["ours"] == texts["transformers"] else "no"}


if __name__ == "__main__":
    main()
