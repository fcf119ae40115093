"""Tokens per second of this project's generation and of transformers' `generate` on the same
untrained weights, in turns in one process, greedy.

    python -m benchmarks.generation --sizes 3m,26m
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.flags import at_least, names, numbers
from benchmarks.markdown import heading, row, table
from benchmarks.work import VOCAB_SIZE
from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from formats.llama import DTYPES, llama_config, to_llama
from inference.decoder import Decoder
from inference.generation import generate
from inference.sampling import Sampling
from model import LMConfig, Transformer

PROGRAM = "benchmarks.generation"
SIZES = {  # dim, layers, heads; 3m is what run_accelerate.sh trains on a CPU
    "3m": (192, 4, 4),
    "26m": (512, 8, 8),
    "104m": (768, 16, 8),
}
PROMPT_TOKENS, NEW_TOKENS = 16, 128
TITLES = ["model", "precision", "prompts", "ours, tokens/s", "transformers", "ratio", "same text"]


def main(argv: list[str] | None = None) -> None:
    with one_line_errors(PROGRAM, UsageError):
        args = parse_arguments(argv)
        print(heading(PROGRAM, argv))
        print(f"\n{PROMPT_TOKENS} tokens of prompt, {NEW_TOKENS} new ones, greedy\n")
        print(table(TITLES, []))
        for size in args.sizes:
            model = untrained(size, PROMPT_TOKENS + NEW_TOKENS)
            for dtype in args.dtypes:
                for batch_size in args.batch_sizes:
                    prompts = torch.randint(3, VOCAB_SIZE, (batch_size, PROMPT_TOKENS))
                    cells = measure(contenders(model, dtype, prompts), batch_size, args.rounds)
                    print(row([size, dtype, batch_size, *cells]), flush=True)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog=f"python -m {PROGRAM}", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--sizes", type=names(SIZES), default="3m,26m", help=f"of {', '.join(SIZES)}")
    add("--dtypes", type=names(DTYPES), default="float32,bfloat16", help=f"of {', '.join(DTYPES)}")
    add("--batch_sizes", type=numbers(1), default="1,8", help="prompts continued together")
    add("--rounds", type=at_least(1), default=5, help="turns of each contender")
    return parser.parse_args(argv)


def untrained(size: str, context: int) -> Transformer:
    dim, n_layers, n_heads = SIZES[size]
    torch.manual_seed(0)
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


def measure(runs: dict[str, Callable], batch_size: int, rounds: int) -> list[str]:
    """The cells of a row: medians over rounds in which both take their turn, after one round that
    does not count; the ratio is taken within a round."""
    texts = {name: run() for name, run in runs.items()}
    speeds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            speeds[name].append(batch_size * NEW_TOKENS / (time.perf_counter() - started))
    pairs = zip(speeds["ours"], speeds["transformers"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    medians = [f"{statistics.median(speeds[name]):,.0f}" for name in runs]
    return [*medians, f"{ratio:.2f}", "yes" if texts["ours"] == texts["transformers"] else "no"]


if __name__ == "__main__":
    main()
