"""The last words of a run, and what it leaves: finished, or told to stop."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from common.atomic import whole_folder
from data.dataset import PackedDataset
from data.shards import TEXT
from data.tokenizer import copy_tokenizer, open_tokenizer
from formats.peft import save_adapter
from formats.portable import load_portable, save_portable
from model import LMConfig
from model.lora import LoRA, merged_weights
from report.history import read_rows
from report.page import leave_report
from report.picture import draw_losses
from runs.checkpoint import best, val_loss, with_base
from runs.find import BEST
from runs.folder import RunFolder, step_of
from training.arguments import TrainingArguments
from training.interruption import how_to_resume, python
from training.samples import prompt_and_continuation


def finish(
    args: TrainingArguments,
    run: RunFolder,
    config: LMConfig,
    weights: dict[str, Tensor],
    lora: LoRA | None,
    prompt_from: PackedDataset,
    say: Callable[[str], None],
) -> None:
    """Write weights with config and tokenizer, sample.txt, loss.png and report.html, and say a last
    report. Of a run with adapters also these by themselves, as PEFT has them; the weights have
    them added to the base.

    Args:
        weights: those that were trained.

    A run that has `weights` is finished: they come whole, after all but the page that says so.
    """
    if lora:
        with whole_folder(run.adapter) as folder:
            save_adapter(folder, config, weights, lora)
            _copy_template(run, folder)
    with whole_folder(run.weights) as folder:
        save_portable(folder, config, dict(merged_weights(with_base(run, weights, lora), lora)))
        copy_tokenizer(run.tokenizer, folder)
        _copy_template(run, folder)
        # By the files just written: the proof that they can be used.
        model = load_portable(folder)
        tokenizer = open_tokenizer(folder)
        prompt, continuation = prompt_and_continuation(model, args, tokenizer, prompt_from)
        run.sample.write_text(f"{prompt}{continuation}\n", encoding="utf-8")
        draw_losses([run.path], run.loss_picture)
    validations = [row for row in read_rows(run.metrics) if row.get("val_loss") is not None]
    if validations:
        last = validations[-1]
        say(f"\n{_describe(last)}")
        if validations[0]["step"] == 0 < last["step"]:
            say(f"before the first step: {_describe(validations[0])}")
    source = str(run.path)
    lowest = best(run.all_checkpoints())
    if validations and lowest and lowest != run.checkpoint(last["step"]):
        source += BEST
        say(
            f"it was lowest after step {step_of(lowest)}, {val_loss(lowest):.4f}: {source} is "
            "the model of then, which other text will suit better"
        )
    say(f"\nsample, the model going on from {prompt!r}:\n{prompt}{continuation}\n")
    before = [row for row in read_rows(run.samples) if row["step"] == 0 and "text" in row]
    if before:
        say(f"before the first step it went on:\n{before[0]['text']}\n")
    adapter = f"adapter:    {run.adapter}, for PEFT, onto {run.base}\n" if lora else ""
    again = shlex.quote(prompt.replace("\n", " "))
    continues = prompt_from.kind == TEXT
    write = f"scripts.generate {source} --prompt {again}" if continues else f"scripts.chat {source}"
    say(
        f"loss curve: {run.loss_picture}\n"
        f"report:     {leave_report(run)}\n"
        f"weights:    {run.weights}\n{adapter}\n"
        f"next: {python()} -m {write}\n"
        f"      {python()} -m scripts.evaluate {source}\n"
        f"      {python()} -m scripts.export_hf {source} out/hf/{run.path.name}"
    )


def _copy_template(run: RunFolder, folder: Path) -> None:
    """By which others see that these weights answer, and how."""
    if run.template.exists():
        shutil.copyfile(run.template, folder / run.template.name)


def _describe(row: dict) -> str:
    """A validation, in words."""
    return (
        f"validation loss {row['val_loss']:.4f}, perplexity {row['val_perplexity']:.4g}, "
        f"bits per byte {row['val_bits_per_byte']:.4f}"
    )


def say_stopped(run: RunFolder, step: int, reason: str, saved: bool) -> None:
    """The last words of a run that stops before its end."""
    state = "saved" if saved else "NOT SAVED"
    command = "nothing has been saved so far"
    if run.latest.exists():
        command = f"to go on:\n  {how_to_resume(run.path)}"
    print(f"report: {leave_report(run)}")
    print(f"stopped by {reason} after step {step}, {state}; {command}", flush=True)
