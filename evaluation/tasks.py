"""The kinds of data that can be scored, and what is said of their scores."""

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from common.errors import UsageError
from common.numbers import counted, progress_bar
from data.conversations import KEYS as CONVERSATION_KEYS
from data.conversations import conversation_records
from data.corpus import JSONL, TEXT_COLUMN, find_files, load_json, parquet_rows, read_records
from data.dataset import ConversationSet, PackedDataset
from data.errors import DataError
from data.shards import CONVERSATIONS, DESCRIPTION_FILE, read_description
from data.tokenizer import tokenizer_hash
from evaluation.language_modelling import conversation_rows, document_rows, prepared_rows, summary
from evaluation.multiple_choice import answers, question_rows
from evaluation.scoring import LEAST_UNITS, Row, Scorer
from storage.weights import Trained
from training.engine.device import device_name
from training.validation import spread

METRICS = {  # the format of their numbers, and an explanation
    "loss": (".4f", "nats per token"),
    "perplexity": (".2f", ""),
    "bits_per_byte": (".4f", ""),
    "accuracy": (".2%", "of next tokens are the likeliest one"),
    "acc": (".2%", "by log-likelihood of the choice"),
    "acc_norm": (".2%", "by log-likelihood per byte of it"),
    "chance": (".2%", "what guessing gives"),
}
# Conversations are cut after the last answer within the context; questions lose their beginning.
AMOUNTS = ("tokens", "bytes", "sequences", "cut", "left_out", "truncated")
HOW = ("max_seq_len", "stride", "delimiter", "template")
TASKS_OF = {  # flags that not every task has
    "split": ("packed", "conversations"),
    "stride": ("text",),
    "text_column": ("text",),
    "delimiter": ("choice",),
    "template": ("choice",),
}


def check_flags(args: Namespace) -> None:
    """Raise UsageError for a flag that means nothing for this data."""
    for name, tasks in TASKS_OF.items():
        if getattr(args, name) is not None and args.task not in tasks:
            raise UsageError(f"--{name} is for --task {' or '.join(tasks)}, not {args.task}")
    if args.split is not None and not is_prepared(args.data):
        raise UsageError(f"--split is for a prepared folder, and {args.data} is none")


def is_prepared(data: str) -> bool:
    return (Path(data) / DESCRIPTION_FILE).exists()


def detect_task(data: str, text_column: str | None = None) -> str:
    """Return the task that prepared data, or the first line of the first file, is for."""
    if is_prepared(data):
        is_chat = read_description(data)["kind"] == CONVERSATIONS
        return "conversations" if is_chat else "packed"
    path, column, keys = find_files(data)[0], text_column or TEXT_COLUMN, set()
    with suppress(StopIteration, AttributeError, DataError):  # scoring says what is wrong with it
        if path.endswith(".parquet"):
            keys = next(parquet_rows(path, (column, *CONVERSATION_KEYS))).keys()
        elif path.endswith(JSONL):
            keys = load_json(next(read_records([path]))).keys()
    if "question" in keys:
        return "choice"
    return "conversations" if keys & {*CONVERSATION_KEYS} and column not in keys else "text"


def evaluate(args: Namespace, trained: Trained, scorer: Scorer) -> dict:
    """Score a model; return all numbers. Raises UsageError: no data, or a broken model."""
    began = time.perf_counter()
    rows, total, facts = to_score(args, trained)
    hidden = not scorer.accelerator.is_main_process
    rows = progress_bar(total, desc="scoring", unit=" rows", iterable=rows, disable=hidden)
    units = list(scorer.units(rows))
    if not units:
        raise DataError(f"{args.data}: no text, no answer within the context, or no question in it")
    found = answers(units) if args.task == "choice" else summary(units)
    about = {
        "model": str(trained.folder),
        "parameters": trained.n_parameters,
        "max_seq_len": trained.model.config.max_seq_len,
        **{name: getattr(args, name) for name in ("data", "task", "limit", *TASKS_OF)},
        "batch_size": scorer.batch_size,
        "dtype": str(scorer.dtype).removeprefix("torch."),
        "device": device_name(scorer.accelerator.device),
        "processes": scorer.accelerator.num_processes,
        "seconds": time.perf_counter() - began,
    }
    return about | found | facts


def to_score(args: Namespace, trained: Trained) -> tuple[Iterator[Row], int | None, dict]:
    """Return the rows to score, how many there are (None if only reading them tells), and facts
    about them, which are complete after the last row."""
    tokenizer, seq_len = trained.tokenizer, trained.model.config.max_seq_len
    if is_prepared(args.data):
        return prepared(args, trained)
    files, is_chat = find_files(args.data), args.task == "conversations"
    column = args.text_column or TEXT_COLUMN
    records = conversation_records(files) if is_chat else read_records(files, column)
    records = islice(records, args.limit or None)
    if is_chat:
        facts = {"unit": "conversations", "cut": 0, "left_out": 0}
        return conversation_rows(records, tokenizer, seq_len, facts), None, facts
    if args.task == "text":
        stride = args.stride or max(1, seq_len // 2)
        if stride > seq_len:
            raise UsageError(f"--stride {stride} leaves tokens out: at most {seq_len}, the context")
        return document_rows(records, tokenizer, seq_len, stride), None, {"stride": stride}
    template = trained.chats if args.template is None else args.template
    if template and args.delimiter is not None:
        raise UsageError("--delimiter is for questions without the template: --no-template")
    how = None if template else " " if args.delimiter is None else args.delimiter
    rows = question_rows(records, tokenizer, seq_len, how)
    return rows, None, {"delimiter": how, "template": template}


def prepared(args: Namespace, trained: Trained) -> tuple[Iterator[Row], int, dict]:
    """Return `to_score` for the samples that the validation of a training run reads. Packed
    sequences that begin in the same document make one unit.

    Raises DataError: prepared with another tokenizer, or shorter than one sequence.
    """
    data, split, seq_len = args.data, args.split or "val", trained.model.config.max_seq_len
    tokenizer, is_packed = trained.tokenizer.path, args.task == "packed"
    if read_description(data).get("tokenizer_sha256") != tokenizer_hash(tokenizer):
        raise DataError(f"{data} has another tokenizer: prepare it with --tokenizer {tokenizer}")
    dataset = (PackedDataset if is_packed else ConversationSet)(data, split, seq_len)
    samples = units = spread(len(dataset), args.limit)
    if is_packed:
        units = dataset.documents_of(samples, trained.tokenizer.bos_id)
        facts = {"sequences": len(samples)}
    else:
        facts = {"cut": dataset.n_cut, "left_out": dataset.n_left_out, "unit": "conversations"}
    return prepared_rows(dataset, samples, units), len(samples), {"split": split} | facts


def report(result: dict) -> str:
    """Return one model's numbers for people, and how they were measured."""
    units = counted(result["units"], result["unit"])
    amounts = [f"{result[name]:,} {name.replace('_', ' ')}" for name in AMOUNTS if result.get(name)]
    how = [f"{name} {result[name]!r}" for name in HOW if result[name] is not None]
    run = f"{result['dtype']}, {result['processes']} × {result['device']}"
    run += f", weights divided by ZeRO-{stage}" if (stage := result["zero_stage"]) else ""
    rows = {
        "model": f"{result['model']} ({result['parameters'] / 1e6:.2f} million parameters)",
        "data": result["data"] + (f", {result['split']} split" if result["split"] else ""),
        "scored": ", ".join([units, *amounts]),
        "how": ", ".join([result["task"], *how]),
        "run": f"{run}, {result['seconds']:.1f} s",
    }
    for name, metric in result["metrics"].items():
        form, explanation = METRICS[name]
        value, low, high = (metric[key] for key in ("value", "low", "high"))
        interval = "" if low in (None, value) else f"  ({low:{form}} to {high:{form}})"
        rows[name] = f"{value:{form}}{interval}  {explanation}".rstrip()
    rows["interval"] = f"95%, by the spread among {units}; none for fewer than {LEAST_UNITS}"
    return "\n".join(f"{name:>13}: {text}" for name, text in rows.items())
