"""Tokens per second of this project's generation and of transformers' `generate` on the same
weights, in turns in one process, greedy.

    python -m benchmarks.generation                 models of three sizes, untrained
    python -m benchmarks.generation --run auto      a trained one
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.machine import cpu_name, versions
from benchmarks.work import VOCAB_SIZE
from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from data.errors import DataError
from formats.llama import DTYPES, llama_config, to_llama
from inference.decoder import Decoder
from inference.generation import generate
from inference.sampling import Sampling
from model import ConfigError, LMConfig, Transformer
from runs.weights import load_trained
from training.engine.device import device_name

SIZES = {  # dim, layers, heads; 3m is what run_accelerate.sh trains on a CPU
    "3m": (192, 4, 4),
    "26m": (512, 8, 8),
    "104m": (768, 16, 8),
}


@dataclass
class Case:
    """One row of the table: medians over rounds."""

    size: str
    dtype: str
    batch_size: int
    ours: float  # tokens per second
    transformers: float
    ratio: float
    same_tokens: bool


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="benchmarks.generation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run", help="a trained model: run folder, weights, or 'auto'")
    add("--sizes", default="3m,26m", help=f"untrained models, of {', '.join(SIZES)} (3m,26m)")
    add("--dtypes", default="float32,bfloat16", help=f"of {', '.join(DTYPES)}")
    add("--batch_sizes", default="1,8", help="prompts continued together (1,8)")
    add("--prompt_tokens", type=int, default=16, help="length of each prompt (16)")
    add("--new_tokens", type=int, default=128, help="tokens to generate for each (128)")
    add("--rounds", type=int, default=5, help="turns of each contender (5)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", type=Path, help="write the table there too")
    args = parser.parse_args(argv)
    args.sizes = [] if args.run else _listed(parser, "sizes", args.sizes, SIZES)
    args.dtypes = _listed(parser, "dtypes", args.dtypes, DTYPES)
    try:
        args.batch_sizes = [int(part) for part in args.batch_sizes.split(",")]
    except ValueError:
        parser.error(f"--batch_sizes must be numbers, not {args.batch_sizes!r}")
    counts = [args.prompt_tokens, args.new_tokens, args.rounds, *args.batch_sizes]
    if min(counts) < 1:
        parser.error("batch sizes, tokens and rounds must be at least 1")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no such folder")
    return args


def _listed(parser: OneLineParser, name: str, text: str, known: dict) -> list[str]:
    parts = text.split(",")
    for part in parts:
        if part not in known:
            parser.error(f"--{name} must be of {', '.join(known)}, not {part!r}")
    return parts


def untrained(size: str, context: int) -> Transformer:
    dim, n_layers, n_heads = SIZES[size]
    torch.manual_seed(0)
    shape = {"n_layers": n_layers, "n_heads": n_heads, "max_seq_len": context}
    return Transformer(LMConfig(dim=dim, vocab_size=VOCAB_SIZE, **shape)).eval()


def llama_of(model: Transformer, dtype: str):
    """The same model as transformers' own class."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**llama_config(model.config, dtype, bos_id=1, eos_id=2))
    llama = LlamaForCausalLM(config).eval()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    missing, unexpected = llama.load_state_dict(to_llama(model.config, weights), strict=False)
    tied = {"lm_head.weight"} if model.config.tie_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ConfigError(f"transformers lacks or has more: {missing}, {unexpected}")
    llama.tie_weights()
    return llama.to(next(model.parameters()).device, DTYPES[dtype])


def contenders(
    model: Transformer, dtype: str, prompts: torch.Tensor, new_tokens: int
) -> dict[str, Callable[[], list[list[int]]]]:
    """name → a function that continues the prompts, (B, T), greedily, and gives the new ids."""
    decoder, llama = Decoder(model, DTYPES[dtype]), llama_of(model, dtype)
    mask = torch.ones_like(prompts)

    def ours() -> list[list[int]]:
        return generate(decoder, prompts.tolist(), new_tokens, Sampling(temperature=0))

    def theirs() -> list[list[int]]:
        ids = llama.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,  # nobody stops before the last token
            pad_token_id=0,
        )
        return ids[:, prompts.shape[1] :].tolist()

    return {"ours": ours, "transformers": theirs}


def measure(size: str, model: Transformer, dtype: str, batch_size: int, args) -> Case:
    """Every contender in turn, args.rounds times, after one round that does not count."""
    prompts = torch.randint(
        3, model.config.vocab_size, (batch_size, args.prompt_tokens), device=args.device
    )
    runs = contenders(model, dtype, prompts, args.new_tokens)
    texts = {name: run() for name, run in runs.items()}
    speeds = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds = time.perf_counter() - started
            speeds[name].append(batch_size * args.new_tokens / seconds)
    ratio = statistics.median(
        a / b for a, b in zip(speeds["ours"], speeds["transformers"], strict=True)
    )
    medians = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    same = texts["ours"] == texts["transformers"]
    return Case(size, dtype, batch_size, **medians, ratio=round(ratio, 3), same_tokens=same)


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("benchmarks.generation", UsageError, DataError, ConfigError):
        args = parse_arguments(argv)
        context = args.prompt_tokens + args.new_tokens
        if args.run:
            models = {args.run: load_trained(args.run).model}
            if context > models[args.run].config.max_seq_len:
                raise UsageError(
                    f"--prompt_tokens and --new_tokens make {context}, the context of {args.run} "
                    f"is {models[args.run].config.max_seq_len}"
                )
        else:
            models = {size: untrained(size, context) for size in args.sizes}
        machine = cpu_name() if args.device == "cpu" else device_name(torch.device(args.device))
        software = ", ".join(f"{name} {number}" for name, number in versions().items())
        print(f"{time.strftime('%Y-%m-%d')}, {machine} ({platform.system()}), {software}")
        print(f"{args.prompt_tokens} tokens of prompt, {args.new_tokens} new ones, greedy\n")
        print("| model | precision | prompts | ours, tokens/s | transformers | ratio | same text |")
        print("|---|---|---|---|---|---|---|")
        cases = []
        for size, model in models.items():
            model.to(args.device)
            for dtype in args.dtypes:
                for batch_size in args.batch_sizes:
                    case = measure(size, model, dtype, batch_size, args)
                    cases.append(case)
                    print(
                        f"| {size} | {dtype} | {batch_size} | {case.ours:,.0f} | "
                        f"{case.transformers:,.0f} | {case.ratio:.2f} | "
                        f"{'yes' if case.same_tokens else 'no'} |",
                        flush=True,
                    )
        if args.json:
            rows = {"machine": machine, "versions": versions(), "cases": list(map(asdict, cases))}
            args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
