"""The kinds of data that can be scored: prepared data, raw text, conversations and questions."""

import time
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from common.errors import UsageError
from common.progress import progress_bar
from data.conversations import KEYS as CONVERSATION_KEYS
from data.conversations import conversation_records
from data.corpus import JSONL, TEXT_COLUMN, find_files, load_json, parquet_rows, read_records
from data.dataset import ConversationSet, PackedDataset
from data.errors import DataError
from data.shards import CONVERSATIONS, DESCRIPTION_FILE, read_description
from data.tokenizer import tokenizer_hash
from evaluation.language_modelling import conversation_rows, document_rows, prepared_rows, summary
from evaluation.multiple_choice import answers, question_rows
from evaluation.scoring import Row, Scorer
from runs.weights import Trained
from training.engine.device import device_name
from training.validation import spread

TASKS_OF = {  # flags that not every task has
    "split": ("packed", "conversations"),
    "stride": ("text",),
    "text_column": ("text",),
    "delimiter": ("choice",),
    "template": ("choice",),
}


def check_flags(args: Namespace) -> None:
    """Raise UsageError for a flag that means nothing for this kind of data."""
    for name, tasks in TASKS_OF.items():
        if getattr(args, name) is not None and args.task not in tasks:
            raise UsageError(f"--{name} is for --task {' or '.join(tasks)}, not {args.task}")
    if args.split is not None and not is_prepared(args.data):
        raise UsageError(f"--split is for a prepared folder, and {args.data} is none")


def is_prepared(data: str) -> bool:
    """Return whether this is a folder that scripts.prepare_data has made."""
    return (Path(data) / DESCRIPTION_FILE).exists()


def detect_task(data: str, text_column: str | None = None) -> str:
    """Return the task that prepared data, or the first line of the first file, is for. Raises
    DataError: there is no such file, or it cannot be read."""
    if is_prepared(data):
        is_chat = read_description(data)["kind"] == CONVERSATIONS
        return "conversations" if is_chat else "packed"
    path, column = find_files(data)[0], text_column or TEXT_COLUMN
    records = iter(())
    if path.endswith(".parquet"):
        records = parquet_rows(path, (column, *CONVERSATION_KEYS))
    elif path.endswith(JSONL):
        records = map(load_json, read_records([path]))
    try:
        keys = next(records).keys()
    except (StopIteration, AttributeError, DataError):  # scoring says what is wrong with it
        return "text"
    if "question" in keys:
        return "choice"
    return "conversations" if keys & {*CONVERSATION_KEYS} and column not in keys else "text"


def evaluate(args: Namespace, trained: Trained, scorer: Scorer) -> dict:
    """Score a model. Returns all numbers, and what was scored with what.

    Raises UsageError, DataError: there is nothing to score, or the model is broken.
    """
    began = time.perf_counter()
    rows, total, facts = to_score(args, trained)
    hidden = not scorer.accelerator.is_main_process
    rows = progress_bar(total, desc="scoring", unit=" rows", iterable=rows, disable=hidden)
    units = list(scorer.units(rows))
    if not units:
        raise DataError(f"{args.data}: no text, no answer within the context, or no question in it")
    found = answers(units) if args.task == "choice" else summary(units)
    found["seconds"] = seconds = time.perf_counter() - began
    if "tokens" in found:
        found["tokens_per_second"] = found["tokens"] / seconds
    about = {
        "model": str(trained.folder),
        "parameters": trained.n_parameters,
        "max_seq_len": trained.model.config.max_seq_len,
        **{name: getattr(args, name) for name in ("data", "task", "limit", *TASKS_OF)},
        "batch_size": scorer.batch_size,
        "dtype": str(scorer.dtype).removeprefix("torch."),
        "device": device_name(scorer.accelerator.device),
        "processes": scorer.accelerator.num_processes,
        "packages": {name: version(name) for name in ("torch", "accelerate", "sentencepiece")},
    }
    return about | found | facts


def to_score(args: Namespace, trained: Trained) -> tuple[Iterator[Row], int | None, dict]:
    """Return the rows to score, how many there are (None if only reading them tells), and facts
    about them, which are complete after the last row."""
    tokenizer, seq_len = trained.tokenizer, trained.model.config.max_seq_len
    if is_prepared(args.data):
        return prepared(args, trained)
    files = find_files(args.data)
    if args.task == "conversations":
        records = islice(conversation_records(files), args.limit or None)
        facts = {"unit": "conversations", "cut": 0, "left_out": 0}
        return conversation_rows(records, tokenizer, seq_len, facts), None, facts
    records = read_records(files, args.text_column or TEXT_COLUMN)
    records = islice(records, args.limit or None)
    if args.task == "text":
        stride = args.stride or max(1, seq_len // 2)
        if stride > seq_len:
            raise UsageError(f"--stride {stride} leaves tokens out: at most {seq_len}, the context")
        return document_rows(records, tokenizer, seq_len, stride), None, {"stride": stride}
    template = trained.chats if args.template is None else args.template
    if template and args.delimiter is not None:
        raise UsageError("--delimiter is for questions without the template: --no-template")
    how = None if template else " " if args.delimiter is None else args.delimiter
    facts = {"delimiter": how, "template": template}
    return question_rows(records, tokenizer, seq_len, how), None, facts


def prepared(args: Namespace, trained: Trained) -> tuple[Iterator[Row], int, dict]:
    """Return `to_score` for the samples that the validation of a training run reads.

    Packed sequences that begin in the same document make one unit. Each conversation is a unit.

    Raises DataError: prepared with another tokenizer, or shorter than one sequence.
    """
    data, split, seq_len = args.data, args.split or "val", trained.model.config.max_seq_len
    tokenizer = trained.tokenizer.path
    if read_description(data).get("tokenizer_sha256") != tokenizer_hash(tokenizer):
        raise DataError(f"{data} has another tokenizer: prepare it with --tokenizer {tokenizer}")
    if args.task == "packed":
        dataset = PackedDataset(data, split, seq_len)
        samples = spread(len(dataset), args.limit)
        units = dataset.documents_of(samples, trained.tokenizer.bos_id)
        facts = {"sequences": len(samples)}
    else:
        dataset = ConversationSet(data, split, seq_len)
        samples = units = spread(len(dataset), args.limit)
        facts = {"cut": dataset.n_cut, "left_out": dataset.n_left_out, "unit": "conversations"}
    return prepared_rows(dataset, samples, units), len(samples), {"split": split} | facts
