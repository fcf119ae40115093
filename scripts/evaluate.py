"""Measure how good a model is: on prepared data, raw text, conversations or questions.

    python -m scripts.evaluate RUN                          # on the validation split of the run
    python -m scripts.evaluate RUN --data text.jsonl        # raw text, with a sliding window
    python -m scripts.evaluate RUN --data questions.jsonl   # {"question", "choices", "answer"}
    python -m scripts.evaluate BASE TUNED --data chat.jsonl # answers, of one below the other
    accelerate launch --multi_gpu --num_processes 2 -m scripts.evaluate RUN   # GPUs, and CPUs too
    accelerate launch --config_file configs/zero3_offload.yaml -m scripts.evaluate RUN

Processes share the work. The last command is for a model that is larger than a GPU.
"""

import argparse
import json
from pathlib import Path

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from data.corpus import BUILTIN, SUFFIXES
from scripts.model_flags import at_least_1


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.evaluate", description=__doc__)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="run, RUN@best, checkpoint, weights, or 'auto'")
    source = f"prepared folder, {', '.join(SUFFIXES)} file, folder of them, or '{BUILTIN}'"
    add("--data", help=f"{source} (default: the data of the run)")
    kinds = ("packed", "text", "choice", "conversations")
    add("--task", choices=kinds, help="what --data is (default: by the first line of the file)")
    add("--text_column", help="name of the text in .jsonl, .csv and .parquet (default: text)")
    add("--split", choices=("val", "train"), help="of prepared data (default: val)")
    add("--stride", type=at_least_1, help="tokens from one window of text to the next")
    add("--delimiter", help="put between a question and a choice (default: one space)")
    yes_or_no = argparse.BooleanOptionalAction
    add("--template", action=yes_or_no, help="ask as in a chat (default: if the model chats)")
    add("--limit", type=int, default=0, help="samples, spread, or the first of a file; 0: all")
    add("--batch_size", type=at_least_1, default=16, help="rows per process at a time")
    add("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU that has it")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="a GPU if there is one")
    add("--json", type=Path, metavar="FILE", help="write all numbers and settings there")
    args = parser.parse_args(argv)
    if args.limit < 0:
        parser.error(f"--limit must be at least 0, not {args.limit}")
    if args.json and (args.json.is_dir() or not args.json.resolve().parent.is_dir()):
        parser.error(f"--json {args.json}: no file can be written there")
    return args


@one_line_errors("evaluate", UsageError, OSError)
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)

    from evaluation.scoring import build_scorer  # these import torch, which takes seconds
    from evaluation.tasks import check_flags, detect_task, evaluate, report
    from storage.find import data_of
    from storage.weights import WeightsFolder, load_trained
    from training.engine.zero_inference import ZeroInference

    # Weights stay in float32, whatever --dtype autocast computes in.
    zero = ZeroInference.of_launch(args.device, dtype="float32")
    results = []
    for name in args.runs:
        trained = load_trained(name, zero.load if zero else WeightsFolder.load)
        if not results:  # data of the first are for all
            args.data = args.data or data_of(str(trained.folder))
            args.task = args.task or detect_task(args.data, args.text_column)
            check_flags(args)
        scorer = build_scorer(trained.model, args.batch_size, args.device, args.dtype)
        results.append(evaluate(args, trained, scorer) | {"zero_stage": 3 if zero else None})
        scorer.accelerator.print(f"{report(results[-1])}\n")
    if args.json and scorer.accelerator.is_main_process:
        text = json.dumps(results if len(results) > 1 else results[0], indent=2, ensure_ascii=False)
        args.json.write_text(f"{text}\n", encoding="utf-8")
    scorer.accelerator.end_training()


if __name__ == "__main__":
    main()
    from training.interruption import leave

    leave()
