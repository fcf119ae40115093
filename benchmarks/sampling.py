"""Compare sampling settings: how often a text is caught in a loop, and how it differs from text.

    python -m benchmarks.sampling out/runs/one out/runs/two --judge out/runs/long

Each run continues the beginnings of windows of its validation text with each of SETTINGS; the first
row of a table is the text itself. *Loops*: the share of continuations in which a token, or a pair,
stands REPEATS times in a row. *Repeated*: the share of 4-grams that stood before in the same
continuation. *Judge*: the mean negative log-likelihood in nats per token by a better model with the
same tokenizer; below that of the text, continuations are too plain, above it too wild.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cli import heading, new_parser, table
from lm.common.errors import UsageError, one_line_errors, stop_in_order
from lm.data.dataset import PackedDataset
from lm.inference.decoder import Decoder
from lm.inference.generation import generate
from lm.inference.sampling import Sampling
from lm.storage.find import data_of
from lm.storage.weights import load_trained
from model import ConfigError

PROGRAM = "benchmarks.sampling"
PROMPT = 16  # tokens
REPEATS = 8
PLAIN = Sampling(temperature=1.0, top_k=50)
USUAL = replace(PLAIN, temperature=0.8)
SETTINGS = {
    "temperature 0.8, top_k 50": USUAL,
    "temperature 1, top_k 50": PLAIN,
    "temperature 0.8, top_k 50, penalty 1.1": replace(USUAL, repetition_penalty=1.1),
    "temperature 1, min_p 0.05": replace(PLAIN, top_k=0, min_p=0.05),
}


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        parser = new_parser(PROGRAM, __doc__)
        add = parser.add_argument
        add("runs", nargs="+", help="finished runs")
        add("--judge", help="a better model with the same tokenizer (default: none)")
        add("--samples", type=int, default=128, help="continuations per setting")
        add("--tokens", type=int, default=200, help="tokens of a continuation")
        args = parser.parse_args(argv)
        judge = load_trained(args.judge).model.eval() if args.judge else None
        print(heading(PROGRAM, argv))
        for run in args.runs:
            trained = load_trained(run)
            texts = windows(data_of(trained.folder), PROMPT + args.tokens, args.samples)
            prompts = [text[:PROMPT] for text in texts]
            decoder = Decoder(trained.model)
            rows = [row("the text", [text[PROMPT:] for text in texts], prompts, judge)]
            for name, how in SETTINGS.items():
                new = generate(decoder, prompts, args.tokens, how)
                rows.append(row(name, new, prompts, judge))
            print(f"\n{Path(run).name}:\n\n{table(rows)}", flush=True)


def windows(data: str, length: int, count: int) -> list[list[int]]:
    """Return `count` windows of the validation split, evenly spaced, or as many as there are."""
    split = PackedDataset(data, "val", length)
    return [split[i][0].tolist() for i in range(0, len(split), max(1, len(split) // count))][:count]


def row(name: str, new: list[list[int]], prompts: list[list[int]], judge) -> dict[str, str]:
    repeated = [share for text in new if (share := repeated_share(text)) is not None]
    found = {
        "": name,
        "loops": f"{sum(map(has_loop, new)) / len(new):.1%}",
        "repeated": f"{sum(repeated) / len(repeated):.1%}",
    }
    if judge:
        nats = torch.cat(list(losses(judge, new, prompts)))
        found["judge, nats per token"] = f"{nats.mean():.3f}"
    return found


def has_loop(text: list[int]) -> bool:
    """Return whether a token, or a pair of tokens, stands REPEATS times in a row."""
    for period in (1, 2):
        same = 0  # tokens in a row that equal the token `period` before
        for before, token in zip(text, text[period:], strict=False):
            same = same + 1 if before == token else 0
            if same >= period * (REPEATS - 1):
                return True
    return False


def repeated_share(text: list[int], n: int = 4) -> float | None:
    """Return the share of n-grams that stood before in the text; None: it has none."""
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


@torch.no_grad()
def losses(judge, new: list[list[int]], prompts: list[list[int]]) -> Iterator[torch.Tensor]:
    """Yield the negative log-likelihoods in nats of the new tokens of each text."""
    for prompt, text in zip(prompts, new, strict=True):
        whole = torch.tensor([prompt + text])[:, : judge.config.max_seq_len + 1]
        logits = judge(whole[:, :-1]).logits[0].float()
        nats = torch.nn.functional.cross_entropy(logits, whole[0, 1:], reduction="none")
        yield nats[len(prompt) - 1 :]


if __name__ == "__main__":
    main()
