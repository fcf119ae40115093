"""The last words of a run, and what it leaves: finished, or told to stop."""

import shlex

from torch import Tensor

from common.atomic import whole_folder
from data.dataset import PackedDataset
from data.tokenizer import copy_tokenizer, open_tokenizer
from formats.portable import load_portable, save_portable
from model import LMConfig
from report.history import read_rows
from report.page import leave_report
from report.picture import draw_losses
from runs.checkpoint import best, val_loss
from runs.find import BEST
from runs.folder import RunFolder
from training.arguments import TrainingArguments
from training.interruption import how_to_resume, python
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
    with whole_folder(run.weights) as folder:
        save_portable(folder, config, weights)
        copy_tokenizer(run.tokenizer, folder)
        # By the files just written: the proof that they can be used.
        model = load_portable(folder)
        tokenizer = open_tokenizer(folder)
        prompt, continuation = prompt_and_continuation(model, args, tokenizer, prompt_from)
        run.sample.write_text(f"{prompt}{continuation}\n", encoding="utf-8")
        draw_losses([run.path], run.loss_picture)
    validations = [row for row in read_rows(run.metrics) if row.get("val_loss") is not None]
    if validations:
        last = validations[-1]
        print(
            f"\nvalidation loss {last['val_loss']:.4f}, perplexity {last['val_perplexity']:.4g}, "
            f"bits per byte {last['val_bits_per_byte']:.4f}"
        )
    source = str(run.path)
    lowest = best(run.all_checkpoints())
    if validations and lowest and lowest != run.checkpoint(last["step"]):
        source += BEST
        print(
            f"it was lowest after step {int(lowest.name[5:])}, {val_loss(lowest):.4f}: {source} is "
            "the model of then, which other text will suit better"
        )
    print(f"\nsample, the model going on from {prompt!r}:\n{prompt}{continuation}\n")
    again = shlex.quote(prompt.replace("\n", " "))
    print(
        f"loss curve: {run.loss_picture}\n"
        f"report:     {leave_report(run)}\n"
        f"weights:    {run.weights}\n\n"
        f"next: {python()} -m scripts.generate {source} --prompt {again}\n"
        f"      {python()} -m scripts.evaluate {source}\n"
        f"      {python()} -m scripts.export_hf {source} out/hf/{run.path.name}",
        flush=True,
    )


def say_stopped(run: RunFolder, step: int, reason: str, saved: bool) -> None:
    """The last words of a run that stops before its end."""
    state = "saved" if saved else "NOT SAVED"
    command = "nothing has been saved so far"
    if run.latest.exists():
        command = f"to go on:\n  {how_to_resume(run.path)}"
    print(f"report: {leave_report(run)}")
    print(f"stopped by {reason} after step {step}, {state}; {command}", flush=True)
