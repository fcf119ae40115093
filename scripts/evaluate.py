"""Evaluate models on prepared data, raw text, conversations or multiple-choice questions.

    python -m scripts.evaluate RUN                          # validation split
    python -m scripts.evaluate RUN --data text.jsonl        # sliding window
    python -m scripts.evaluate RUN --data questions.jsonl   # multiple choice
    python -m scripts.evaluate BASE TUNED --data chat.jsonl  # two models in turn

Several processes share the work, on GPUs or CPUs. With ZeRO-3 they also divide the weights:

    accelerate launch --multi_gpu --num_processes 2 -m scripts.evaluate RUN
    accelerate launch --config_file configs/zero3_offload.yaml -m scripts.evaluate RUN
"""

import argparse
import json
from functools import partial
from pathlib import Path

from lm.common.errors import UsageError, one_line_errors
from lm.common.parser import OneLineParser
from lm.common.tasks import join_tasks
from lm.data.corpus import BUILTIN, SUFFIXES
from scripts.model_flags import at_least_1


@one_line_errors("evaluate", UsageError, OSError)
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m scripts.evaluate", description=__doc__)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="run, RUN@best, checkpoint, weights, or 'auto'")
    source = f"prepared folder, {', '.join(SUFFIXES)} file, folder of files, or '{BUILTIN}'"
    add("--data", help=f"{source} (default: the data of the first RUN)")
    tasks = ("packed", "text", "choice", "conversations")
    add("--task", choices=tasks, help="kind of --data (default: detected from it)")
    add("--text_column", help="key or column of the text in .jsonl, .csv, .parquet (default: text)")
    add("--split", choices=("val", "train"), help="split of prepared data (default: val)")
    add("--stride", type=at_least_1, help="window's shift in tokens (default: half of max_seq_len)")
    add("--delimiter", help="text between a question and a choice (default: one space)")
    on_or_off = argparse.BooleanOptionalAction
    add("--template", action=on_or_off, help="use the chat template (default: for chat models)")
    add("--limit", type=int, default=0, help="number of samples to score; 0: all")
    add("--batch_size", type=at_least_1, default=16, help="sequences per batch on each process")
    add("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 if the GPU supports it")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if any")
    add("--json", type=Path, metavar="FILE", help="write the numbers and the settings to FILE")
    args = parser.parse_args(argv)
    join_tasks()
    if args.limit < 0:
        parser.error(f"--limit must be at least 0, not {args.limit}")
    if args.json and (args.json.is_dir() or not args.json.resolve().parent.is_dir()):
        parser.error(f"--json {args.json}: no file can be written there")

    from lm.engine.zero_inference import config_of_launch, load_divided
    from lm.evaluation.scoring import build_scorer  # importing torch takes seconds
    from lm.evaluation.tasks import detect_task, evaluate, report
    from lm.storage.find import data_of
    from lm.storage.weights import WeightsFolder, load_trained

    # The weights stay in float32. --dtype is the precision of autocast.
    zero = config_of_launch(args.device, dtype="float32")
    load = partial(load_divided, zero) if zero else WeightsFolder.load
    results = []
    for name in args.runs:
        trained = load_trained(name, load)
        if not results:  # the first model decides the data and the task for all models
            args.data = args.data or data_of(trained.folder)
            args.task = args.task or detect_task(args.data, args.text_column)
        scorer = build_scorer(trained.model, args.batch_size, args.device, args.dtype)
        results.append(evaluate(args, trained, scorer) | {"zero_stage": 3 if zero else None})
        scorer.accelerator.print(f"{report(results[-1])}\n")
    if args.json and scorer.accelerator.is_main_process:
        text = json.dumps(results if args.runs[1:] else results[0], indent=2, ensure_ascii=False)
        args.json.write_text(f"{text}\n", encoding="utf-8")
    scorer.accelerator.end_training()


if __name__ == "__main__":
    main()
    from lm.engine.engine import exit_rank

    exit_rank()
