"""What a finished run leaves: portable weights, a sample, a picture, and a last word on where they are."""

import shutil

from torch import Tensor

from data.dataset import PackedDataset
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from model import LMConfig
from model.generation import generate
from model.portable import load_portable, save_portable
from training.arguments import TrainingArguments
from training.plot import draw_losses
from training.run_folder import RunFolder


def finish(
    args: TrainingArguments, run: RunFolder, config: LMConfig, weights: dict[str, Tensor], train_set: PackedDataset
) -> None:
    """Write weights with config and tokenizer, sample.txt and loss.png, and print the sample and the paths."""
    save_portable(run.weights, config, weights)
    shutil.copyfile(train_set.tokenizer_path, run.weights / TOKENIZER_FILE)
    draw_losses(run.metrics, run.loss_picture)
    sample = continuation(args, run)
    run.sample.write_text(sample + "\n", encoding="utf-8")
    print(f"\nsample, the model going on from {args.sample_prompt!r}:\n{sample}\n")
    print(f"loss curve: {run.loss_picture}\nweights:    {run.weights}", flush=True)


def continuation(args: TrainingArguments, run: RunFolder) -> str:
    """Prompt and continuation by the weights just written, read back from disk: the proof that they are usable."""
    tokenizer = Tokenizer(run.weights / TOKENIZER_FILE)
    prompt = [tokenizer.bos_id, *tokenizer.encode(args.sample_prompt)]
    ids = generate(
        load_portable(run.weights), prompt, args.sample_tokens, seed=args.seed, stop_id=tokenizer.eos_id
    )
    return args.sample_prompt + tokenizer.decode(ids)
