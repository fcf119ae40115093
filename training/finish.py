"""What a finished run leaves: portable weights, a sample, pictures, and where they are."""

import shlex
import shutil
import sys
from pathlib import Path

from torch import Tensor

from data.dataset import PackedDataset
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from model import LMConfig
from model.portable import load_portable, save_portable
from report.history import read_rows
from report.page import leave_report
from report.picture import draw_losses
from training.arguments import TrainingArguments
from training.run_folder import RunFolder
from training.samples import prompt_and_continuation


def finish(
    args: TrainingArguments,
    run: RunFolder,
    config: LMConfig,
    weights: dict[str, Tensor],
    prompt_from: PackedDataset,
) -> None:
    """Write weights with config and tokenizer, sample.txt, loss.png and report.html, and print a
    last report.

    A run that has `weights` is finished: they come whole, after all but the page that says so.
    """
    aside = run.weights.with_name("weights.partial")
    save_portable(aside, config, weights)
    shutil.copyfile(prompt_from.tokenizer_path, aside / TOKENIZER_FILE)
    # By the files just written: the proof that they can be used.
    model, tokenizer = load_portable(aside), Tokenizer(aside / TOKENIZER_FILE)
    prompt, continuation = prompt_and_continuation(model, args, tokenizer, prompt_from)
    run.sample.write_text(f"{prompt}{continuation}\n", encoding="utf-8")
    draw_losses([run.path], run.loss_picture)
    shutil.rmtree(run.weights, ignore_errors=True)
    aside.rename(run.weights)
    validations = [row for row in read_rows(run.metrics) if "val_loss" in row]
    if validations:
        last = validations[-1]
        print(
            f"\nvalidation loss {last['val_loss']:.4f}, perplexity {last['val_perplexity']:.4g}, "
            f"bits per byte {last['val_bits_per_byte']:.4f}"
        )
    print(f"\nsample, the model going on from {prompt!r}:\n{prompt}{continuation}\n")
    again = shlex.quote(prompt.replace("\n", " "))
    print(
        f"loss curve: {run.loss_picture}\n"
        f"report:     {leave_report(run)}\n"
        f"weights:    {run.weights}\n\n"
        f"next: {python()} -m scripts.generate {run.path} --prompt {again}\n"
        f"      {python()} -m scripts.evaluate {run.path}\n"
        f"      {python()} -m scripts.export_hf {run.path} out/hf/{run.path.name}",
        flush=True,
    )


def python() -> str:
    """What to type for the Python that runs this: run_accelerate.sh may have made .venv."""
    here = Path(sys.executable)
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else "python"
