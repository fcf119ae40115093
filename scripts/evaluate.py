"""How good a model is: on prepared data, on raw text, on multiple-choice questions.

    python -m scripts.evaluate RUN                          # on the validation split of the run
    python -m scripts.evaluate RUN --data text.jsonl        # raw text, with a sliding window
    python -m scripts.evaluate RUN --data questions.jsonl   # {"question", "choices", "answer"}
    accelerate launch --multi_gpu --num_processes 2 -m scripts.evaluate RUN   # GPUs, and CPUs too

Every number comes with a 95% interval. Processes share the work and do not change the numbers.
"""

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from common.progress import progress_bar
from data.corpus import BUILTIN, Record, find_files, is_jsonl, load_json, read_records
from data.errors import DataError
from data.shards import DESCRIPTION_FILE, read_description

TASKS = ("packed", "text", "choice")
FLAG_BELONGS_TO = {"split": "packed", "stride": "text", "delimiter": "choice"}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.evaluate", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="run folder, checkpoint, folder of weights, or 'auto'")
    add(
        "--data",
        help="folder made by scripts.prepare_data, .txt, .jsonl or .jsonl.gz file, folder of them, "
        f"or '{BUILTIN}' (default: the data of the run)",
    )
    add("--task", choices=TASKS, help="what --data is (default: as it looks)")
    add("--split", choices=("val", "train"), help="of prepared data (default: val)")
    add(
        "--stride",
        type=int,
        help="raw text: tokens from one window to the next (default: half of max_seq_len); every "
        "token has at least max_seq_len - stride tokens of context, or all there are",
    )
    add("--delimiter", help="put between a question and a choice (default: one space)")
    add(
        "--limit",
        type=int,
        default=0,
        metavar="N",
        help="N sequences spread over the split, as --eval_samples in training, or the first N "
        "documents or questions (default: all)",
    )
    add("--batch_size", type=int, default=16, help="rows per process at a time")
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="bfloat16 runs under autocast (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto is a GPU if there is one",
    )
    add("--json", type=Path, metavar="FILE", help="write all numbers and settings there")
    args = parser.parse_args(argv)
    for name, least in (("stride", 1), ("limit", 0), ("batch_size", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, not {value}")
    if args.json and (args.json.is_dir() or not args.json.resolve().parent.is_dir()):
        parser.error(f"--json {args.json}: no file can be written there")
    if any("\ud800" <= c <= "\udfff" for c in args.delimiter or ""):  # of bytes that are no UTF-8
        parser.error(f"--delimiter {args.delimiter!r} is no text")
    return args


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("evaluate", UsageError):
        args = parse_arguments(argv)
    from model import ConfigError  # not above: --help need not wait seconds for torch

    with one_line_errors("evaluate", UsageError, ConfigError, DataError, OSError):
        evaluate(args)


def evaluate(args: argparse.Namespace) -> None:
    """Raises UsageError, ConfigError or DataError: there is nothing to score, or no model."""
    from evaluation.answer import describe, report, write_json
    from evaluation.scoring import build_scorer
    from runs.weights import load_trained

    trained = load_trained(args.run)
    args.data = args.data or data_of_run(trained.folder)
    args.task = args.task or detect_task(args.data)
    refuse_idle_flags(args)
    scorer = build_scorer(trained.model, args.batch_size, args.device, args.dtype)
    start = time.perf_counter()
    score = {"packed": score_packed, "text": score_text, "choice": score_choices}[args.task]
    result = score(args, trained, scorer)
    result["seconds"] = seconds = time.perf_counter() - start
    if "tokens" in result:
        result["tokens_per_second"] = result["tokens"] / seconds
    if scorer.accelerator.is_main_process:
        result = describe(args, trained, scorer) | result
        print(report(result))
        if args.json:
            write_json(args.json, result)
    scorer.accelerator.end_training()


def data_of_run(source: Path) -> str:
    """The data that the run of these weights was trained on.

    Raises:
        UsageError: it is not recorded, or no longer there.
    """
    weights = source.resolve()
    for folder in (weights.parent, weights.parent.parent):  # of weights/, of checkpoints/step-N/
        try:
            settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
            data = str(settings["arguments"]["data"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not Path(data).exists():
            raise UsageError(f"the run was trained on {data}, which is not there: give --data")
        return data
    raise UsageError(f"{source} does not tell which data it was trained on: give --data")


def detect_task(data: str) -> str:
    """What the path is, by its files and the first line of the first.

    Raises:
        DataError: nothing there that could be scored.
    """
    if (Path(data) / DESCRIPTION_FILE).exists():
        return "packed"
    files = find_files(data)
    first = next(read_records(files), None)
    if first is None:
        raise DataError(f"{files[0]}: an empty file" if len(files) == 1 else f"{data}: no text")
    if not is_jsonl(first.path):
        return "text"
    fields = load_json(first)
    if isinstance(fields, dict) and ("question" in fields or "text" in fields):
        return "choice" if "question" in fields else "text"
    raise DataError(f'{first.place}: neither a "text" nor a "question"')


def refuse_idle_flags(args: argparse.Namespace) -> None:
    """Raises UsageError: a flag that means nothing for this kind of data."""
    for name, task in FLAG_BELONGS_TO.items():
        if getattr(args, name) is not None and args.task != task:
            raise UsageError(f"--{name} is for --task {task}, but {args.data} is {args.task}")


def score_packed(args: argparse.Namespace, trained, scorer) -> dict:
    from data.dataset import PackedDataset
    from evaluation.language_modelling import packed_sums

    seq_len, args.split = trained.model.config.max_seq_len, args.split or "val"
    check_tokenizer(args.data, trained)
    if not PackedDataset.fits(args.data, args.split, seq_len):
        raise DataError(
            f"{args.data}: the {args.split} split is shorter than one sequence of {seq_len} tokens"
        )
    dataset = PackedDataset(args.data, args.split, seq_len)
    total = min(args.limit or len(dataset), len(dataset))
    with progress(scorer, total, "sequence") as bar:
        bos_id = trained.tokenizer.bos_id
        sums = packed_sums(scorer, dataset, args.limit, bos_id, bar.update)
    return {"sequences": total} | language_result(sums, "documents")


def check_tokenizer(folder: str, trained) -> None:
    """Raises DataError: the data was prepared with another tokenizer than the model's."""
    import hashlib

    ours = hashlib.sha256(Path(trained.tokenizer.path).read_bytes()).hexdigest()
    if read_description(folder).get("tokenizer_sha256") != ours:
        raise DataError(
            f"{folder} was prepared with another tokenizer than that of {trained.folder}: prepare "
            f"the text with --tokenizer {trained.tokenizer.path}, or give the text itself"
        )


def score_text(args: argparse.Namespace, trained, scorer) -> dict:
    from evaluation.language_modelling import document_rows, text_sums

    seq_len = trained.model.config.max_seq_len
    args.stride = args.stride or max(1, seq_len // 2)
    if args.stride > seq_len:
        raise UsageError(
            f"--stride {args.stride} leaves tokens out: at most {seq_len}, the context"
        )
    with records(args, scorer, "document") as documents:
        rows = document_rows(documents, trained.tokenizer, seq_len, args.stride)
        sums = text_sums(scorer, rows)
    if not sums.n:
        raise DataError(f"{args.data}: no document with any text to score")
    return language_result(sums, "documents")


def language_result(sums, unit: str) -> dict:
    from evaluation.language_modelling import BYTES, TOKENS, metrics

    totals = {"tokens": int(sums.totals[TOKENS]), "bytes": round(sums.totals[BYTES])}
    return {"units": sums.n, "unit": unit, **totals, "metrics": metrics(sums)}


def score_choices(args: argparse.Namespace, trained, scorer) -> dict:
    from evaluation.multiple_choice import ChoiceCounts, answer, question_rows

    args.delimiter = " " if args.delimiter is None else args.delimiter
    counts, seq_len = ChoiceCounts(), trained.model.config.max_seq_len
    with records(args, scorer, "question") as lines:
        rows = question_rows(lines, trained.tokenizer, seq_len, args.delimiter, counts)
        answer(scorer, rows, counts)
    if not counts.n:
        raise DataError(f"{args.data}: no question in it")
    result = {"units": counts.n, "unit": "questions", "truncated": counts.truncated}
    return result | {"metrics": counts.metrics()}


@contextmanager
def progress(scorer, total: int | None, unit: str, scale: bool = False) -> Iterator:
    hidden = not scorer.accelerator.is_main_process
    with progress_bar(total, desc="scoring", unit=unit, scale=scale, disable=hidden) as bar:
        yield bar


@contextmanager
def records(args: argparse.Namespace, scorer, unit: str) -> Iterator[Iterable[Record]]:
    """The first args.limit records of the files, with a progress bar over them, or their bytes."""
    files = find_files(args.data)
    packed = any(path.endswith(".gz") for path in files)
    n_bytes = None if packed else sum(map(os.path.getsize, files))
    total, unit = (args.limit, unit) if args.limit else (n_bytes, "B")
    with progress(scorer, total, unit, scale=not args.limit) as bar:

        def read() -> Iterator[Record]:
            for record in islice(read_records(files), args.limit or None):
                yield record
                bar.update(1 if args.limit else len(record.raw))

        yield read()


if __name__ == "__main__":
    main()
    from training.interruption import leave

    leave()
