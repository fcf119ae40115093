"""What a run leaves for people: samples while it trains; then weights, curves and a report."""

import json
import shlex
import shutil
from pathlib import Path

import torch
from torch import Tensor

from common.atomic import whole_folder
from data.chat_template import encode_chat_prompt
from data.conversations import Turn
from data.shards import CONVERSATIONS, TEXT
from data.tokenizer import Tokenizer, copy_tokenizer, open_tokenizer
from formats.peft import save_adapter
from formats.portable import load_portable, save_portable
from inference.decoder import Decoder
from inference.generation import generate
from inference.sampling import Sampling
from model import IGNORE_INDEX, Transformer
from model.lora import merged_weights
from report.history import read_history
from report.page import draw_losses, final_numbers, leave_report
from storage.checkpoint import with_base
from storage.find import BEST
from storage.folder import RunFolder
from training.interruption import how_to_resume, python
from training.log import TrainingLog
from training.prepare import Prepared

PROMPT_TOKENS = 12  # of the validation text, where no prompt is given
SHOWN = 80  # characters of a sample in the log


def prompt_and_continuation(
    model: Decoder | Transformer, tokenizer: Tokenizer, prepared: Prepared
) -> tuple[str, str]:
    """Return the prompt, or how the validation data begins, and how the model goes on."""
    args, data, next_ids = prepared.args, prepared.val_set or prepared.train_set, []
    if args.sample_prompt is None:
        tokens, targets = data[0]
        if data.kind == CONVERSATIONS:  # up to its first answer
            prompt = tokens[: int((targets != IGNORE_INDEX).nonzero()[0]) + 1].tolist()
        else:
            prompt = tokens[:PROMPT_TOKENS].tolist()
            while len(prompt) > 1 and tokenizer.decode(prompt).endswith("\ufffd"):
                prompt.pop()  # the first bytes of a character
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


def write_sample(step: int, model: Transformer | None, prepared: Prepared, log: TrainingLog):
    """Add a sample to samples.jsonl, on the main process. A copy of the `model` makes it, in the
    precision of training, with a random generator of its own. A full disk does not stop training.
    """
    if not log.accelerator.is_main_process:  # the others wait at their next exchange
        return
    decoder = Decoder(model, getattr(torch, prepared.args.dtype))
    tokenizer = open_tokenizer(log.folder.path)  # --data may be prepared anew meanwhile
    with torch.compiler.set_stance("force_eager"):  # other shapes would be compiled anew
        prompt, text = prompt_and_continuation(decoder, tokenizer, prepared)
    row = json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False)
    try:
        with open(log.folder.samples, "a", encoding="utf-8") as file:
            file.write(f"{row}\n")
    except OSError as error:
        log.say(f"SAMPLE NOT WRITTEN: {error}")
    log.say(f"step {step}/{log.total_steps}  sample {(prompt + text)[:SHOWN]!r}")


def leave_results(prepared: Prepared, weights: dict[str, Tensor], log: TrainingLog) -> None:
    """Write the trained weights, with adapters added to the base, sample.txt, loss.png and
    report.html, and say the last words. A run with a folder of weights is finished."""
    run, config, lora = prepared.start.folder, prepared.config, prepared.shapes.lora
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
        prompt, continuation = prompt_and_continuation(model, tokenizer, prepared)
        run.sample.write_text(f"{prompt}{continuation}\n", encoding="utf-8")
        draw_losses([run.path], run.loss_picture)
    write = f"scripts.chat {run.path}"
    if not run.template.exists():
        again = shlex.quote(prompt.replace("\n", " "))
        write = f"scripts.generate {run.path} --prompt {again}"
    adapter = f"adapter:    {run.adapter}, for PEFT, onto {run.base}\n" if lora else ""
    best = final_numbers(read_history(run.path)).get("best validation loss", "")
    best = best and f"best validation loss {best}: {run.path}{BEST}\n"
    log.say(
        f"\n{best}"
        f"\nsample, the model going on from {prompt!r}:\n{prompt}{continuation}\n\n"
        f"loss curve: {run.loss_picture}\n"
        f"report:     {leave_report([run.path], run.report)}\n"
        f"weights:    {run.weights}\n{adapter}\n"
        f"next: {python()} -m {write}\n"
        f"      {python()} -m scripts.evaluate {run.path}\n"
        f"      {python()} -m scripts.export_hf {run.path} out/hf/{run.path.name}"
    )


def _copy_template(run: RunFolder, folder: Path) -> None:
    if run.template.exists():
        shutil.copyfile(run.template, folder / run.template.name)


def say_stopped(run: RunFolder, step: int, reason: str, saved: bool) -> None:
    """Say why a run stopped before its end, whether it is saved, and how to go on."""
    state, command = "saved" if saved else "NOT SAVED", "nothing has been saved so far"
    if run.latest.exists():
        command = f"to go on:\n  {how_to_resume(run.path)}"
    print(f"report: {leave_report([run.path], run.report)}")
    print(f"stopped by {reason} after step {step}, {state}; {command}", flush=True)
