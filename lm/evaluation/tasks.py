"""Choose the task for the data, score a model on it, and describe the result."""

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from lm.common.errors import UsageError
from lm.common.numbers import counted, progress_bar
from lm.data.conversation_set import ConversationSet
from lm.data.conversations import CHAT_KEYS, CHAT_SUFFIXES, conversation_records
from lm.data.corpus import TEXT_COLUMN, find_splits, load_json, read_records, suffix_of
from lm.data.dataset import PackedDataset
from lm.data.order import spread
from lm.data.shards import CONVERSATIONS, is_prepared, read_description
from lm.data.tokenizer import tokenizer_hash
from lm.engine.hardware import device_name
from lm.evaluation.multiple_choice import KEYS as QUESTION_KEYS
from lm.evaluation.multiple_choice import answers, question_rows
from lm.evaluation.rows import conversation_rows, document_rows, prepared_rows
from lm.evaluation.scoring import LEAST_UNITS, Row, Scorer, summary
from lm.formats.portable import without_memory
from lm.storage.weights import Trained

METRICS = {  # name → (number format, explanation)
    "loss": (".4f", "nats per token"),
    "perplexity": (".2f", ""),
    "bits_per_byte": (".4f", ""),
    "accuracy": (".2%", "of next tokens had the highest probability of all tokens"),
    "acc": (".2%", "by log-likelihood of the choice"),
    "acc_norm": (".2%", "by log-likelihood per byte of the choice"),
    "chance": (".2%", "with random answers"),
}
# "cut" and "left_out" count conversations, "truncated" counts questions.
AMOUNTS = (
    *("tokens", "bytes", "sequences", "cut", "left_out", "truncated"),
    *("changed_by_tokenizer", "with_markers_as_text"),
)
HOW = ("max_seq_len", "stride", "delimiter", "template")  # settings in the line "how" of `report`
TASKS_OF = {  # flag → tasks that accept it
    "split": ("packed", "conversations"),
    "stride": ("text",),
    "text_column": ("text",),
    "delimiter": ("choice",),
    "template": ("choice",),
}


def split_to_score(data: str) -> tuple[str | None, list[str]]:
    """Return the files to score. Of a folder with splits these are the files for validation, or
    else for testing, and the name of this split. Otherwise the name is None."""
    splits = find_splits(data)
    name = next((name for name in ("val", "test") if splits[name]), None)
    return name, splits[name or "train"]


def detect_task(data: str, text_column: str | None = None) -> str:
    """Detect the task from the kind of prepared data, or from the first record of other data."""
    if is_prepared(data):
        is_chat = read_description(data)["kind"] == CONVERSATIONS
        return "conversations" if is_chat else "packed"
    path, column, keys = split_to_score(data)[1][0], text_column or TEXT_COLUMN, set()
    with suppress(StopIteration, UsageError):  # scoring reports a bad first line
        if suffix_of(path) in CHAT_SUFFIXES:
            keys = load_json(
                next(read_records([path], (column, *QUESTION_KEYS, *CHAT_KEYS)))
            ).keys()
    if "question" in keys:
        return "choice"
    is_chat = column not in keys and any(key in keys for key in CHAT_KEYS)
    return "conversations" if is_chat else "text"


def evaluate(args: Namespace, trained: Trained, scorer: Scorer) -> dict:
    """Score a model; return metrics and settings. Raises UsageError if data or weights are bad, or
    a flag does not apply to this task or this data."""
    for name, tasks in TASKS_OF.items():
        if getattr(args, name) is not None and args.task not in tasks:
            raise UsageError(f"--{name} is for --task {' or '.join(tasks)}, not {args.task}")
    began = time.perf_counter()
    rows, total, facts = to_score(args, trained)
    is_main = scorer.accelerator.is_main_process
    rows = progress_bar(total, desc="scoring", unit=" rows", iterable=rows, disable=not is_main)
    units = list(scorer.units(rows))  # this scores all rows
    if not units:
        raise UsageError(f"{args.data} has no text, question, or answer that fits into the context")
    scores = answers(units) if args.task == "choice" else summary(units)
    settings = {
        "model": str(trained.folder),
        # Not counted in the model itself: under ZeRO-3 a process holds only a share.
        "parameters": without_memory(trained.model.config).num_parameters(),
        "max_seq_len": trained.model.config.max_seq_len,
        **{name: getattr(args, name) for name in ("data", "task", "limit", *TASKS_OF)},
        "batch_size": scorer.batch_size,
        "dtype": str(scorer.dtype).removeprefix("torch."),
        "device": device_name(scorer.accelerator.device),
        "processes": scorer.accelerator.num_processes,
        "seconds": time.perf_counter() - began,
    }
    return settings | scores | facts


def to_score(args: Namespace, trained: Trained) -> tuple[Iterator[Row], int | None, dict]:
    """Return the rows to score, their number (None if unknown), and facts for the result. The
    counts in the facts are complete after the last row."""
    if args.split or args.task == "packed" or is_prepared(args.data):
        return prepared(args, trained)
    tokenizer, seq_len = trained.tokenizer, trained.model.config.max_seq_len
    (split, files), is_chat = split_to_score(args.data), args.task == "conversations"
    column = args.text_column or TEXT_COLUMN
    columns = QUESTION_KEYS if args.task == "choice" else (column,)
    records = conversation_records(files) if is_chat else read_records(files, columns)
    records = islice(records, args.limit or None)  # 0 is no limit
    facts = {"split": split, "changed_by_tokenizer": 0}
    if is_chat:
        facts |= {"unit": "conversations", "cut": 0, "left_out": 0}
        return conversation_rows(records, tokenizer, seq_len, facts), None, facts
    if args.task == "text":
        stride = args.stride or max(1, seq_len // 2)
        if stride > seq_len:
            raise UsageError(f"--stride {stride} skips tokens: pass at most {seq_len}, the context")
        facts |= {"stride": stride, "with_markers_as_text": 0}
        return document_rows(records, tokenizer, seq_len, stride, facts), None, facts
    template = trained.chats if args.template is None else args.template
    if template and args.delimiter is not None:
        raise UsageError("--delimiter is for questions without the template: add --no-template")
    delimiter = " " if args.delimiter is None and not template else args.delimiter
    rows = question_rows(records, tokenizer, seq_len, delimiter)
    return rows, None, {"split": split, "delimiter": delimiter, "template": template}


def prepared(args: Namespace, trained: Trained) -> tuple[Iterator[Row], int, dict]:
    """Return rows of evenly spaced samples, their number, and facts for the result.
    Raises UsageError if the data has another tokenizer, or no sample for this context length."""
    data, split, tokenizer = args.data, args.split or "val", trained.tokenizer.path
    if read_description(data).get("tokenizer_sha256") != tokenizer_hash(tokenizer):
        raise UsageError(f"{data} has another tokenizer: prepare it with --tokenizer {tokenizer}")
    is_packed = args.task == "packed"
    kind = PackedDataset if is_packed else ConversationSet
    dataset = kind(data, split, trained.model.config.max_seq_len)
    samples = units = spread(len(dataset), args.limit)
    if is_packed:  # sequences that begin in the same document are one unit
        units = dataset.documents_of(samples, trained.tokenizer.bos_id)
        facts = {"sequences": len(samples)}
    else:  # a conversation is a unit
        facts = {"cut": dataset.n_cut, "left_out": dataset.n_left_out, "unit": "conversations"}
    return prepared_rows(dataset, samples, units), len(samples), {"split": split} | facts


def report(result: dict) -> str:
    """Return the result of one model as text: the metrics and how they were measured."""
    units = counted(result["units"], result["unit"])
    amounts = [f"{result[name]:,} {name.replace('_', ' ')}" for name in AMOUNTS if result.get(name)]
    how = [f"{name} {result[name]!r}" for name in HOW if result[name] is not None]
    run = f"{result['dtype']}, {result['processes']} × {result['device']}"
    if result["zero_stage"]:
        run += f", weights divided by ZeRO-{result['zero_stage']}"
    rows = {
        "model": f"{result['model']} ({result['parameters'] / 1e6:.2f} million parameters)",
        "data": result["data"] + (f", {result['split']} split" if result["split"] else ""),
        "scored": ", ".join([units, *amounts]),
        "how": ", ".join([result["task"], *how]),
        "run": f"{run}, {result['seconds']:.1f} s",
    }
    for name, metric in result["metrics"].items():
        form, explanation = METRICS[name]
        text = f"{metric['value']:{form}}"
        if metric["low"] not in (None, metric["value"]):
            text += f"  ({metric['low']:{form}} to {metric['high']:{form}})"
        rows[name] = f"{text}  {explanation}".rstrip()
    rows["interval"] = f"95%, from the differences among {units} (at least {LEAST_UNITS} needed)"
    return "\n".join(f"{name:>13}: {text}" for name, text in rows.items())
