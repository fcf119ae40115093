"""The last words of a run, and what it leaves: finished, or told to stop."""

import shlex
import shutil

from torch import Tensor

from common.atomic import whole_folder
from data.dataset import PackedDataset
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from formats.peft import save_adapter
from formats.portable import load_portable, save_portable
from model import LMConfig
from model.lora import LoRA, merged_weights
from report.history import read_rows
from report.page import leave_report
from report.picture import draw_losses
from runs.base import with_base
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
    lora: LoRA | None,
    prompt_from: PackedDataset,
) -> None:
    """Write weights with config and tokenizer, sample.txt, loss.png and report.html, and print a
    last report. Of a run with adapters also these by themselves, as PEFT has them; the weights have
    them added to the base.

    Args:
        weights: those that were trained.

    A run that has `weights` is finished: they come whole, after all but the page that says so.
    """
    if lora:
        with whole_folder(run.adapter) as folder:
            save_adapter(folder, config, weights, lora)
    with whole_folder(run.weights) as folder:
        save_portable(folder, config, dict(merged_weights(with_base(run, weights, lora), lora)))
        shutil.copyfile(run.tokenizer, folder / TOKENIZER_FILE)
        # By the files just written: the proof that they can be used.
        model = load_portable(folder)
        tokenizer = Tokenizer(folder / TOKENIZER_FILE)
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
    adapter = f"adapter:    {run.adapter}, for PEFT, onto {run.base}\n" if lora else ""
    again = shlex.quote(prompt.replace("\n", " "))
    print(
        f"loss curve: {run.loss_picture}\n"
        f"report:     {leave_report(run)}\n"
        f"weights:    {run.weights}\n{adapter}\n"
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
