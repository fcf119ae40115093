"""What a run leaves at its end, and its last words: finished, or told to stop."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from common.atomic import whole_folder
from data.dataset import PackedDataset
from data.tokenizer import copy_tokenizer, open_tokenizer
from formats.peft import save_adapter
from formats.portable import load_portable, save_portable
from model import LMConfig
from model.lora import LoRA, merged_weights
from report.history import read_history
from report.page import draw_losses, final_numbers, leave_report
from runs.checkpoint import with_base
from runs.find import BEST
from runs.folder import RunFolder
from training.arguments import TrainingArguments
from training.interruption import how_to_resume, python
from training.samples import prompt_and_continuation

VALIDATION = ("validation loss", "perplexity", "bits per byte", "best validation loss")


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
    write = f"scripts.chat {run.path}"
    if not run.template.exists():
        again = shlex.quote(prompt.replace("\n", " "))
        write = f"scripts.generate {run.path} --prompt {again}"
    adapter = f"adapter:    {run.adapter}, for PEFT, onto {run.base}\n" if lora else ""
    say(
        f"\n{_validations(run)}\n"
        f"\nsample, the model going on from {prompt!r}:\n{prompt}{continuation}\n\n"
        f"loss curve: {run.loss_picture}\n"
        f"report:     {leave_report([run.path], run.report)}\n"
        f"weights:    {run.weights}\n{adapter}\n"
        f"next: {python()} -m {write}\n"
        f"      {python()} -m scripts.evaluate {run.path}\n"
        f"      {python()} -m scripts.export_hf {run.path} out/hf/{run.path.name}"
    )


def _copy_template(run: RunFolder, folder: Path) -> None:
    """Copy the chat template, by which other programs see that these weights answer."""
    if run.template.exists():
        shutil.copyfile(run.template, folder / run.template.name)


def _validations(run: RunFolder) -> str:
    """Describe the last validation, a better one, and the one before training."""
    history = read_history(run.path)
    numbers = final_numbers(history)
    text = ", ".join(f"{name} {numbers[name]}" for name in VALIDATION if name in numbers)
    if "best validation loss" in numbers:
        text += f": {run.path}{BEST}"
    first = next(iter(history.validation), {})
    if first.get("step") == 0 and first["val_loss"]:
        text += f"\nbefore the first step: validation loss {first['val_loss']:.4f}"
    return text


def say_stopped(run: RunFolder, step: int, reason: str, saved: bool) -> None:
    """Say why a run stopped before its end, whether it is saved, and how to go on."""
    state = "saved" if saved else "NOT SAVED"
    command = "nothing has been saved so far"
    if run.latest.exists():
        command = f"to go on:\n  {how_to_resume(run.path)}"
    print(f"report: {leave_report([run.path], run.report)}")
    print(f"stopped by {reason} after step {step}, {state}; {command}", flush=True)
