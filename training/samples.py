"""Text that the model writes, while it is trained and at the end."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import torch

from data.chat_template import encode_chat_prompt
from data.conversations import Turn
from data.dataset import PackedDataset
from data.shards import CONVERSATIONS, TEXT
from data.tokenizer import Tokenizer, open_tokenizer
from inference.decoder import Decoder
from inference.generation import generate
from inference.sampling import Sampling
from model import IGNORE_INDEX, Transformer
from training.arguments import TrainingArguments
from training.log import TrainingLog, drop_rows_from

PROMPT_TOKENS = 12  # of the validation text, where no prompt is given
SHOWN = 80  # characters of a sample in the log


def prompt_and_continuation(
    model: Decoder | Transformer, args: TrainingArguments, tokenizer: Tokenizer, data: PackedDataset
) -> tuple[str, str]:
    """Return the prompt (--sample_prompt, or how `data` begins) and how the model goes on."""
    next_ids = []
    if args.sample_prompt is None:
        prompt = first_prompt(data, tokenizer)
    elif data.kind == TEXT:
        prompt, next_ids = tokenizer.encode_prompt(args.sample_prompt)
    else:
        prompt = encode_chat_prompt(tokenizer, [Turn("user", args.sample_prompt)])
    (ids,) = generate(
        model,
        [prompt],
        args.sample_tokens,
        Sampling(seed=args.seed),
        next_ids=[next_ids],
        stop_ids=(tokenizer.eos_id,),
    )
    return tokenizer.decode(prompt), tokenizer.decode(ids)


def first_prompt(data: PackedDataset, tokenizer: Tokenizer) -> list[int]:
    """Return how text begins, or a conversation up to its first answer."""
    tokens, targets = data[0]
    if data.kind == CONVERSATIONS:
        return tokens[: int((targets != IGNORE_INDEX).nonzero()[0]) + 1].tolist()
    prompt = tokens[:PROMPT_TOKENS].tolist()
    while len(prompt) > 1 and tokenizer.decode(prompt).endswith("\ufffd"):
        prompt.pop()  # the first bytes of a character
    return prompt


@dataclass
class SampleWriter:
    """Write samples to samples.jsonl, on the main process.

    A sample is made by a copy of the weights, in the precision of training's forward pass, with a
    random generator of its own: training goes on as if nothing had happened. On a GPU the copy has
    to fit beside everything else; under ZeRO-3 it is on the CPU.
    """

    args: TrainingArguments
    path: Path  # samples.jsonl of a run; rows of steps that are trained again are dropped
    whole_model: Callable[[], Transformer | None]  # see `TrainingState`
    prompt_from: PackedDataset  # whose beginning is the prompt where none was given
    log: TrainingLog  # says what was written

    def open(self) -> None:
        """Make room for the rows of this start; call it before the first sample."""
        if self.log.accelerator.is_main_process:
            drop_rows_from(self.path, self.log.first_step)

    def write(self, step: int) -> None:
        """Write a sample; every process must call this. A full disk does not stop training."""
        model = self.whole_model()
        if not self.log.accelerator.is_main_process:  # the others wait at their next exchange
            return
        decoder = Decoder(model, getattr(torch, self.args.dtype))
        tokenizer = open_tokenizer(self.path.parent)  # --data may be prepared anew meanwhile
        with torch.compiler.set_stance("force_eager"):  # other shapes would be compiled anew
            prompt, text = prompt_and_continuation(decoder, self.args, tokenizer, self.prompt_from)
        row = {"step": step, "prompt": prompt, "text": text}
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            for tracker in self.log.accelerator.trackers:
                if tracker.name == "tensorboard":
                    tracker.log({"sample": indent(prompt + text, "    ")}, step=step)
        except OSError as error:
            self.log.say(f"SAMPLE NOT WRITTEN: {error}")
        self.log.say(f"step {step}/{self.log.total_steps}  sample {(prompt + text)[:SHOWN]!r}")
