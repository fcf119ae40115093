"""What a finished run leaves: portable weights, a sample, a picture, and where they are."""

import shutil
from pathlib import Path

from torch import Tensor

from data.dataset import PackedDataset
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from model import LMConfig
from model.generation import generate
from model.portable import load_portable, save_portable
from model.sampling import Sampling
from training.arguments import TrainingArguments
from training.plot import draw_losses, read_metrics
from training.run_folder import RunFolder

PROMPT_TOKENS = 12  # of the validation text, where no prompt is given


def finish(
    args: TrainingArguments,
    run: RunFolder,
    config: LMConfig,
    weights: dict[str, Tensor],
    prompt_from: PackedDataset,
) -> None:
    """Write weights with config and tokenizer, sample.txt and loss.png, and print a last report.

    `weights` comes last and whole: a run that has it is finished.
    """
    aside = run.weights.with_name("weights.partial")
    save_portable(aside, config, weights)
    shutil.copyfile(prompt_from.tokenizer_path, aside / TOKENIZER_FILE)
    prompt, continuation = sample(args, aside, prompt_from)
    run.sample.write_text(f"{prompt}{continuation}\n", encoding="utf-8")
    draw_losses(run.metrics, run.loss_picture)
    shutil.rmtree(run.weights, ignore_errors=True)
    aside.rename(run.weights)
    validations = [row for row in read_metrics(run.metrics) if "val_loss" in row]
    if validations:
        last = validations[-1]
        print(
            f"\nvalidation loss {last['val_loss']:.4f}, perplexity {last['val_perplexity']:.4g}, "
            f"bits per byte {last['val_bits_per_byte']:.4f}"
        )
    print(f"\nsample, the model going on from {prompt!r}:\n{prompt}{continuation}\n")
    print(f"loss curve: {run.loss_picture}\nweights:    {run.weights}", flush=True)


def sample(args: TrainingArguments, weights: Path, prompt_from: PackedDataset) -> tuple[str, str]:
    """Prompt and continuation, by the weights just written: the proof that they can be used."""
    tokenizer = Tokenizer(weights / TOKENIZER_FILE)
    if args.sample_prompt is None:
        start = prompt_from[0][0][:PROMPT_TOKENS].tolist()
    else:
        start = [tokenizer.bos_id, *tokenizer.encode(args.sample_prompt)]
    (ids,) = generate(
        load_portable(weights),
        [start],
        args.sample_tokens,
        Sampling(seed=args.seed),
        stop_ids=(tokenizer.eos_id,),
    )
    return tokenizer.decode(start), tokenizer.decode(ids)
