"""Write samples during training; at its end, write weights, loss curve and report."""

import json
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from lm.common.atomic import whole_folder
from lm.common.errors import reported
from lm.data.chat_template import encode_chat_prompt
from lm.data.conversations import Turn
from lm.data.shards import CONVERSATIONS, TEXT
from lm.data.tokenizer import Tokenizer, copy_tokenizer, open_tokenizer
from lm.formats.peft import save_adapter
from lm.formats.portable import load_portable, save_portable
from lm.inference.decoder import Decoder
from lm.inference.generation import generate
from lm.inference.sampling import Sampling
from lm.report.history import read_history
from lm.report.page import draw_losses, final_numbers, try_to, write_report
from lm.storage.checkpoint import with_base
from lm.storage.find import BEST
from lm.storage.folder import RunFolder
from lm.training.inputs import Inputs
from lm.training.interruption import how_to_resume, python
from lm.training.log import TrainingLog
from model import IGNORE_INDEX, Transformer
from model.lora import merged_weights

CONTINUATIONS = 3  # of the prompt, that the finished model writes
PROMPT_TOKENS = 12  # tokens of a prompt from text data, if --sample_prompt is not given
SHOWN = 80  # characters of a sample that the log shows, at most half of them from the prompt


def prompt_and_continuations(
    model: Decoder | Transformer, tokenizer: Tokenizer, inputs: Inputs, count: int = 1
) -> tuple[str, list[str]]:
    """Return the prompt (by default from validation or training data) and its continuations."""
    args, data = inputs.args, inputs.val_set or inputs.train_set
    next_ids = []  # tokens with which the continuation may begin; []: all
    if args.sample_prompt is None:
        tokens, targets, *_ = data[0]
        if data.kind == CONVERSATIONS:  # the conversation up to its first answer that counts
            prompt = tokens[: int((targets != IGNORE_INDEX).nonzero()[0]) + 1].tolist()
        else:
            prompt = tokens[:PROMPT_TOKENS].tolist()
            while len(prompt) > 1 and tokenizer.decode(prompt).endswith("\ufffd"):
                prompt.pop()  # the prompt must not end inside a character
    elif data.kind == TEXT:
        prompt, next_ids = tokenizer.encode_prompt(args.sample_prompt)
    else:
        prompt = encode_chat_prompt(tokenizer, [Turn("user", args.sample_prompt)])
    how, stop = Sampling(seed=args.seed), (tokenizer.eos_id,)
    more = {"next_ids": next_ids, "stop_ids": stop}
    texts = generate(model, [prompt] * count, args.sample_tokens, how, **more)
    return tokenizer.decode(prompt), [tokenizer.decode(ids) for ids in texts]


def write_sample(step: int, model: Transformer | None, inputs: Inputs, log: TrainingLog):
    """Append a sample to samples.jsonl, on the main process. A copy of the model generates the text
    with its own random generator, so training does not change. An error does not end the run."""
    if not log.accelerator.is_main_process:  # other ranks wait at the next collective operation
        return
    with reported("SAMPLE", log.say):
        decoder = Decoder(model, getattr(torch, inputs.args.dtype))
        decoder.recorded = False  # no CUDA graph: no other thread may use the GPU meanwhile
        tokenizer = open_tokenizer(log.folder.path)  # that of --data may be newer
        with torch.compiler.set_stance("force_eager"):  # do not compile for new shapes
            prompt, (text,) = prompt_and_continuations(decoder, tokenizer, inputs)
        log.say(f"step {step}/{log.total_steps}  sample {(prompt[-SHOWN // 2 :] + text)[:SHOWN]!r}")
        row = json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False)
        with open(log.folder.samples, "a", encoding="utf-8") as file:
            file.write(f"{row}\n")


def write_results(inputs: Inputs, weights: dict[str, Tensor], log: TrainingLog) -> None:
    """Write adapters, and weights (adapters merged in), which mark a run as finished; sample.txt,
    loss.png and report.html, each of which may fail in one line; print commands to try next."""
    run, config, lora = inputs.start.folder, inputs.config, inputs.shapes.lora
    if lora:
        with whole_folder(run.adapter) as folder:
            save_adapter(folder, config, weights, lora)
            _copy_template(run, folder)
    with whole_folder(run.weights) as folder:
        save_portable(folder, config, dict(merged_weights(with_base(run, weights, lora), lora)))
        copy_tokenizer(run.tokenizer, folder)
        _copy_template(run, folder)
    path = shlex.quote(str(run.path))
    next_command = f"scripts.{'chat' if run.template.exists() else 'generate'} {path}"
    with reported("SAMPLE", log.say):
        # Generate the sample from the new files, to check that they can be used.
        model, tokenizer = load_portable(run.weights), open_tokenizer(run.weights)
        prompt, texts = prompt_and_continuations(model, tokenizer, inputs, CONTINUATIONS)
        if not run.template.exists():
            next_command += " --prompt " + shlex.quote(prompt.replace("\n", " "))
        samples = "".join(f"--- sample {i} ---\n{prompt}{x}\n" for i, x in enumerate(texts, 1))
        log.say(f"\nthe model's continuations of {prompt!r}:\n{samples}")
        run.sample.write_text(samples, encoding="utf-8")
    with reported("BEST LOSS", log.say):
        if best := final_numbers(read_history(run.path)).get("best validation loss"):
            log.say(f"best validation loss {best}: {run.path}{BEST}")
    adapter = f"adapter:    {run.adapter}, in PEFT's format (base weights: {run.base})\n"
    log.say(
        f"loss curve: {try_to(draw_losses, [run.path], run.loss_picture)}\n"
        f"report:     {write_page([run])}\n"
        f"weights:    {run.weights}\n{adapter if lora else ''}\n"
        f"next: {python()} -m {next_command}\n"
        f"      {python()} -m scripts.evaluate {path}\n"
        f"      {python()} -m scripts.export_hf {path} {shlex.quote(f'out/hf/{run.path.name}')}"
    )


def _copy_template(run: RunFolder, folder: Path) -> None:
    if run.template.exists():
        shutil.copyfile(run.template, folder / run.template.name)


def write_page(runs: list[RunFolder]) -> str:
    """Write the report of a run into its folder, or that of several runs beside their folders.
    Return its path, or why it could not be written."""
    page = runs[0].path.with_name("several.html") if len(runs) > 1 else runs[0].report
    return try_to(write_report, [run.path for run in runs], page)


def say_stopped(runs: list[RunFolder], step: int, reason: str, saved: bool) -> None:
    """Print why runs stopped before their end, whether they are saved, and how to resume them."""
    state, command = "saved" if saved else "NOT SAVED", "nothing has been saved so far"
    if all(run.latest.exists() for run in runs):
        command = f"to go on:\n  {how_to_resume('auto' if len(runs) > 1 else runs[0].path)}"
    with suppress(OSError):  # a terminal that was closed
        print(f"report: {write_page(runs)}")
        print(f"stopped by {reason} after step {step}, {state}; {command}", flush=True)
