"""What a run leaves at its end, and its last words: finished, or told to stop."""

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
from report.page import draw_losses, leave_report
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
    """Write weights, sample.txt, loss.png and report.html, and say the last words.

    A run with a folder of weights is finished: the folder appears whole, after everything but the
    report. A run with adapters also leaves them alone, in PEFT's form; its weights have the
    adapters added to the base.

    Args:
        weights: the trained ones.
        prompt_from: data whose beginning is the prompt where none was given.
    """
    if lora:
        with whole_folder(run.adapter) as folder:
            save_adapter(folder, config, weights, lora)
            _copy_template(run, folder)
    with whole_folder(run.weights) as folder:
        save_portable(folder, config, dict(merged_weights(with_base(run, weights, lora), lora)))
        copy_tokenizer(run.tokenizer, folder)
        _copy_template(run, folder)
        # The sample is written by the files just saved: a proof that they can be used.
        model, tokenizer = load_portable(folder), open_tokenizer(folder)
        prompt, continuation = prompt_and_continuation(model, args, tokenizer, prompt_from)
        run.sample.write_text(f"{prompt}{continuation}\n", encoding="utf-8")
        draw_losses([run.path], run.loss_picture)
    source = _say_validations(run, say)
    say(f"\nsample, the model going on from {prompt!r}:\n{prompt}{continuation}\n")
    before = [row for row in read_rows(run.samples) if row["step"] == 0 and "text" in row]
    if before:
        say(f"before the first step it went on:\n{before[0]['text']}\n")
    write = f"scripts.chat {source}"
    if prompt_from.kind == TEXT:
        again = shlex.quote(prompt.replace("\n", " "))
        write = f"scripts.generate {source} --prompt {again}"
    adapter = f"adapter:    {run.adapter}, for PEFT, onto {run.base}\n" if lora else ""
    say(
        f"loss curve: {run.loss_picture}\n"
        f"report:     {leave_report(run)}\n"
        f"weights:    {run.weights}\n{adapter}\n"
        f"next: {python()} -m {write}\n"
        f"      {python()} -m scripts.evaluate {source}\n"
        f"      {python()} -m scripts.export_hf {source} out/hf/{run.path.name}"
    )


def _copy_template(run: RunFolder, folder: Path) -> None:
    """Copy the chat template, by which other programs see that these weights answer."""
    if run.template.exists():
        shutil.copyfile(run.template, folder / run.template.name)


def _say_validations(run: RunFolder, say: Callable[[str], None]) -> str:
    """Say the last and the first validation; return the run, or RUN@best if it was lower before."""
    validations = [row for row in read_rows(run.metrics) if row.get("val_loss") is not None]
    if not validations:
        return str(run.path)
    first, last = validations[0], validations[-1]
    say(f"\n{_describe(last)}")
    if first["step"] == 0 < last["step"]:
        say(f"before the first step: {_describe(first)}")
    lowest = best(run.all_checkpoints())
    if lowest is None or lowest == run.checkpoint(last["step"]):
        return str(run.path)
    source = f"{run.path}{BEST}"
    say(
        f"it was lowest after step {step_of(lowest)}, {val_loss(lowest):.4f}: {source} is the "
        "model of that step, which suits other text better"
    )
    return source


def _describe(row: dict) -> str:
    return (
        f"validation loss {row['val_loss']:.4f}, perplexity {row['val_perplexity']:.4g}, "
        f"bits per byte {row['val_bits_per_byte']:.4f}"
    )


def say_stopped(run: RunFolder, step: int, reason: str, saved: bool) -> None:
    """Say why a run stopped before its end, whether it is saved, and how to go on."""
    state = "saved" if saved else "NOT SAVED"
    command = "nothing has been saved so far"
    if run.latest.exists():
        command = f"to go on:\n  {how_to_resume(run.path)}"
    print(f"report: {leave_report(run)}")
    print(f"stopped by {reason} after step {step}, {state}; {command}", flush=True)
