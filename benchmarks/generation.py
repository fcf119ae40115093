"""Tokens per second of this project's generation and of transformers' `generate` on the same
untrained weights, in turns in one process, greedy.

    python -m benchmarks.generation --sizes 3m,26m
"""

import argparse
import time
from collections.abc import Callable
from itertools import product
from operator import truediv
from statistics import median

import torch
from torch import Tensor

from benchmarks.flags import at_least, names, new_parser, numbers
from benchmarks.markdown import heading, table
from benchmarks.work import VOCAB_SIZE
from common.errors import UsageError, one_line_errors
from formats.hugging_face_names import llama_config, to_llama
from inference.decoder import Decoder
from inference.generation import generate
from inference.sampling import Sampling
from model import LMConfig, Transformer

PROGRAM = "benchmarks.generation"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = {  # dim, layers, heads; 3m is what run_accelerate.sh trains on a CPU
    "3m": (192, 4, 4),
    "26m": (512, 8, 8),
    "104m": (768, 16, 8),
}
PROMPT_TOKENS, NEW_TOKENS = 16, 128


def main(argv: list[str] | None = None) -> None:
    with one_line_errors(PROGRAM, UsageError):
        args = parse_options(argv)
        print(heading(PROGRAM, argv))
        print(f"\n{PROMPT_TOKENS} tokens of prompt, {NEW_TOKENS} new ones, greedy\n", flush=True)
        rows = []
        for size, dtype, batch_size in product(args.sizes, args.dtypes, args.batch_sizes):
            prompts = torch.randint(3, VOCAB_SIZE, (batch_size, PROMPT_TOKENS))
            runs = contenders(untrained(size), dtype, prompts)
            row = {"model": size, "precision": dtype, "prompts": batch_size}
            rows.append(row | measure(runs, batch_size, args.rounds))
            print(*table(rows).splitlines()[-1 if len(rows) > 1 else 0 :], sep="\n", flush=True)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--sizes", type=names(SIZES), default="3m,26m", help=f"of {', '.join(SIZES)}")
    add("--dtypes", type=names(DTYPES), default="float32,bfloat16", help=f"of {', '.join(DTYPES)}")
    add("--batch_sizes", type=numbers(1), default="1,8", help="prompts continued together")
    add("--rounds", type=at_least(1), default=5, help="turns of each contender")
    return parser.parse_args(argv)


def untrained(size: str) -> Transformer:
    dim, n_layers, n_heads = SIZES[size]
    torch.manual_seed(0)
    context = PROMPT_TOKENS + NEW_TOKENS
    shape = {"n_layers": n_layers, "n_heads": n_heads, "max_seq_len": context}
    model = Transformer(LMConfig(dim=dim, vocab_size=VOCAB_SIZE, **shape)).eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def llama_of(model: Transformer, dtype: str):
    """The same model as transformers' own class."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**llama_config(model.config, dtype, bos_id=1, eos_id=2))
    llama = LlamaForCausalLM(config).eval()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    lacking = llama.load_state_dict(to_llama(model.config, weights), strict=False).missing_keys
    assert set(lacking) <= {"lm_head.weight"}  # the embedding, which is tied to it
    llama.tie_weights()
    return llama.to(next(model.parameters()).device, DTYPES[dtype])


def contenders(
    model: Transformer, dtype: str, prompts: Tensor
) -> dict[str, Callable[[], list[list[int]]]]:
    """name → a function that continues the prompts, (B, T), greedily, and gives the new ids."""
    decoder, llama = Decoder(model, DTYPES[dtype]), llama_of(model, dtype)
    prompts = prompts.to(llama.device)

    def ours() -> list[list[int]]:
        return generate(decoder, prompts.tolist(), NEW_TOKENS, Sampling(temperature=0))

    def theirs() -> list[list[int]]:
        ids = llama.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,  # nobody stops before the last token
            pad_token_id=0,
        )
        return ids[:, prompts.shape[1] :].tolist()

    return {"ours": ours, "transformers": theirs}


def measure(runs: dict[str, Callable], batch_size: int, rounds: int) -> dict[str, str]:
    """Cells of a row: medians over rounds in which both take their turn, after one round that does
    not count; the ratio is taken within a round."""
    texts = {name: run() for name, run in runs.items()}
    speeds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            speeds[name].append(batch_size * NEW_TOKENS / (time.perf_counter() - started))
    ours, theirs = speeds.values()
    return {
        "ours, tokens/s": f"{median(ours):,.0f}",
        "transformers": f"{median(theirs):,.0f}",
        "ratio": f"{median(map(truediv, ours, theirs)):.2f}",
        "same text": "yes" if texts["ours"] == texts["transformers"] else "no",
    }


if __name__ == "__main__":
    main()
