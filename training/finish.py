"""What a finished run leaves: portable weights, a sample, a picture, and where they are."""

import shutil

from torch import Tensor

from data.dataset import PackedDataset
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from model import LMConfig
from model.generation import generate
from model.portable import load_portable, save_portable
from training.arguments import TrainingArguments
from training.plot import draw_losses, read_metrics
from training.run_folder import RunFolder


def finish(
    args: TrainingArguments,
    run: RunFolder,
    config: LMConfig,
    weights: dict[str, Tensor],
    train_set: PackedDataset,
) -> None:
    """Write weights with config and tokenizer, sample.txt and loss.png, and print a last report."""
    aside = run.weights.with_name("weights.partial")
    save_portable(aside, config, weights)
    shutil.copyfile(train_set.tokenizer_path, aside / TOKENIZER_FILE)
    shutil.rmtree(run.weights, ignore_errors=True)
    aside.rename(run.weights)  # whole, or not there: a resumed run looks for it
    draw_losses(run.metrics, run.loss_picture)
    sample = continuation(args, run)
    run.sample.write_text(sample + "\n", encoding="utf-8")
    validations = [row for row in read_metrics(run.metrics) if "val_loss" in row]
    if validations:
        last = validations[-1]
        print(
            f"\nvalidation loss {last['val_loss']:.4f}, perplexity {last['val_perplexity']:.2f}, "
            f"bits per byte {last['val_bits_per_byte']:.4f}"
        )
    print(f"\nsample, the model going on from {args.sample_prompt!r}:\n{sample}\n")
    print(f"loss curve: {run.loss_picture}\nweights:    {run.weights}", flush=True)


def continuation(args: TrainingArguments, run: RunFolder) -> str:
    """Prompt and continuation by the weights just written: the proof that they can be used."""
    tokenizer = Tokenizer(run.weights / TOKENIZER_FILE)
    prompt = [tokenizer.bos_id, *tokenizer.encode(args.sample_prompt)]
    ids = generate(
        load_portable(run.weights),
        prompt,
        args.sample_tokens,
        seed=args.seed,
        stop_id=tokenizer.eos_id,
    )
    return args.sample_prompt + tokenizer.decode(ids)
