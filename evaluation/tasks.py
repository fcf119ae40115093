"""The kinds of data that can be scored: prepared data, raw text, conversations and questions."""

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from common.errors import UsageError
from common.progress import progress_bar
from data.conversation_set import ConversationSet
from data.conversations import KEYS as CONVERSATION_KEYS
from data.conversations import conversation_records
from data.corpus import (
    JSONL,
    TEXT_COLUMN,
    Record,
    find_files,
    load_json,
    read_records,
    require_columns,
)
from data.dataset import PackedDataset
from data.errors import DataError
from data.readers import parquet_rows
from data.shards import CONVERSATIONS, DESCRIPTION_FILE, read_description
from data.tokenizer import tokenizer_hash
from evaluation.language_modelling import (
    conversation_rows,
    document_rows,
    prepared_rows,
    summary,
    unit_sums,
)
from evaluation.multiple_choice import answer, question_rows
from evaluation.scoring import Scorer
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
            known = " or ".join(tasks)
            raise UsageError(f"--{name} is for --task {known}, but {args.data} is {args.task}")
    if args.split is not None and not is_prepared(args.data):
        raise UsageError(f"--split is for a prepared folder, and {args.data} is none")
    if args.text_column is not None:
        require_columns(find_files(args.data), args.text_column)


def is_prepared(data: str) -> bool:
    """Return whether this is a folder that scripts.prepare_data has made."""
    return (Path(data) / DESCRIPTION_FILE).exists()


def detect_task(data: str, text_column: str | None = None) -> str:
    """Return the task that prepared data, or the first line of the first file, is for. Raises
    DataError: there is no such file, or it cannot be read."""
    if is_prepared(data):
        is_chat = read_description(data)["kind"] == CONVERSATIONS
        return "conversations" if is_chat else "packed"
    path = find_files(data)[0]
    if path.endswith(".parquet") and text_column is None:
        fields = next(parquet_rows(path, (TEXT_COLUMN, *CONVERSATION_KEYS)), None)
    elif path.endswith(JSONL):
        first = next(read_records([path]), None)
        fields = load_json(first) if first else None
    else:
        return "text"
    if not isinstance(fields, dict):
        return "text"
    if "question" in fields:
        return "choice"
    is_text = (text_column or TEXT_COLUMN) in fields
    return "conversations" if fields.keys() & {*CONVERSATION_KEYS} and not is_text else "text"


def evaluate(args: Namespace, trained: Trained, scorer: Scorer) -> dict:
    """Score a model. Returns all numbers, and what was scored with what.

    Raises UsageError, DataError: there is nothing to score, or the model is broken.
    """
    start = time.perf_counter()
    score = {
        "packed": score_prepared,
        "conversations": score_prepared if is_prepared(args.data) else score_conversations,
        "text": score_text,
        "choice": score_choices,
    }[args.task]
    result = score(args, trained, scorer)
    result["seconds"] = seconds = time.perf_counter() - start
    if "tokens" in result:
        result["tokens_per_second"] = result["tokens"] / seconds
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
    return about | result


def score_prepared(args: Namespace, trained: Trained, scorer: Scorer) -> dict:
    """Score the samples of a prepared folder that the validation of a training run reads.

    Packed sequences that begin in the same document make one unit. Each conversation is a unit.

    Raises DataError: prepared with another tokenizer, or shorter than one sequence.
    """
    data, split, seq_len = args.data, args.split or "val", trained.model.config.max_seq_len
    tokenizer = trained.tokenizer.path
    if read_description(data).get("tokenizer_sha256") != tokenizer_hash(tokenizer):
        raise DataError(
            f"{data} was prepared with another tokenizer than that of {trained.folder}: prepare "
            f"the text with --tokenizer {tokenizer}, or give the text itself"
        )
    if args.task == "packed":
        dataset = PackedDataset(data, split, seq_len)
        samples = spread(len(dataset), args.limit)
        units = dataset.documents_of(samples, trained.tokenizer.bos_id)
        facts = {"sequences": len(samples)}
    else:
        dataset = ConversationSet(data, split, seq_len)
        samples = units = spread(len(dataset), args.limit)
        facts = {"cut": dataset.n_cut, "left_out": dataset.n_left_out, "unit": "conversations"}
    counted = shown(samples, scorer, len(samples))
    sums = unit_sums(scorer, prepared_rows(dataset, counted, units))
    return {"split": split} | summary(sums, data) | facts


def score_text(args: Namespace, trained: Trained, scorer: Scorer) -> dict:
    """Score documents with a sliding window.

    Raises UsageError: a stride longer than the context. DataError: files that cannot be read, or
    hold no text.
    """
    seq_len = trained.model.config.max_seq_len
    stride = args.stride or max(1, seq_len // 2)
    if stride > seq_len:
        raise UsageError(f"--stride {stride} leaves tokens out: at most {seq_len}, the context")
    rows = document_rows(records(args, scorer), trained.tokenizer, seq_len, stride)
    return {"stride": stride} | summary(unit_sums(scorer, rows), args.data)


def score_conversations(args: Namespace, trained: Trained, scorer: Scorer) -> dict:
    """Score the answers in files of conversations. Raises DataError: files that cannot be read, or
    no answer within the context."""
    counts, seq_len = Counter(cut=0, left_out=0), trained.model.config.max_seq_len
    rows = conversation_rows(records(args, scorer), trained.tokenizer, seq_len, counts)
    found = summary(unit_sums(scorer, rows), args.data)
    return found | dict(counts) | {"unit": "conversations"}


def score_choices(args: Namespace, trained: Trained, scorer: Scorer) -> dict:
    """Answer questions with the likeliest choice. Raises DataError: files that cannot be read, or
    hold no questions."""
    template = trained.chats if args.template is None else args.template
    if template and args.delimiter is not None:
        raise UsageError("--delimiter is for questions without the template: --no-template")
    how = None if template else " " if args.delimiter is None else args.delimiter
    seq_len = trained.model.config.max_seq_len
    rows = question_rows(records(args, scorer), trained.tokenizer, seq_len, how)
    found = answer(scorer, rows)
    if not found["units"]:
        raise DataError(f"{args.data}: no question in it")
    return found | {"delimiter": how, "template": template}


def records(args: Namespace, scorer: Scorer) -> Iterable[Record]:
    """Return the first `limit` records of the files, counted by a progress bar."""
    files = find_files(args.data)
    if args.task == "conversations":
        found = conversation_records(files)
    else:
        found = read_records(files, args.text_column or TEXT_COLUMN)
    return shown(islice(found, args.limit or None), scorer, args.limit or None)


def shown(items: Iterable, scorer: Scorer, total: int | None) -> Iterator:
    """Yield the items, counted by a progress bar of the main process."""
    hidden = not scorer.accelerator.is_main_process
    with progress_bar(total, desc="scoring", unit=" rows", disable=hidden) as bar:
        for item in items:
            yield item
            bar.update()
