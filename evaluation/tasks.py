"""The kinds of data that can be scored: prepared sequences, raw text, multiple-choice questions."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from common.errors import UsageError
from common.progress import progress_bar
from data.conversation_set import ConversationSet
from data.conversations import KEYS as CONVERSATION_KEYS
from data.conversations import conversation_records
from data.corpus import (
    TEXT_COLUMN,
    Reading,
    Record,
    bytes_to_read,
    find_files,
    is_jsonl,
    load_json,
    read_records,
    require_columns,
)
from data.dataset import PackedDataset
from data.errors import DataError
from data.readers import parquet_objects
from data.shards import CONVERSATIONS, DESCRIPTION_FILE, TEXT, read_description
from data.tokenizer import tokenizer_hash
from evaluation.conversations import CutCounts, conversation_rows, prepared_rows
from evaluation.language_modelling import document_rows, packed_sums, summary, text_sums
from evaluation.multiple_choice import ChoiceCounts, answer, question_rows
from evaluation.scoring import Row, Scorer
from runs.folder import RunFolder
from runs.weights import Trained
from training.engine.device import device_name
from training.settings import saved_arguments

FLAGS_OF = {
    "packed": ("split",),
    "conversations": ("split",),
    "text": ("stride", "text_column"),
    "choice": ("delimiter", "template"),
}
PREPARED = {TEXT: "packed", CONVERSATIONS: "conversations"}  # folders, by what they hold


@dataclass
class EvaluationSettings:
    """What is scored, and how; None where nothing was asked for. Raises UsageError: a flag that
    means nothing for this kind of data."""

    data: str  # a prepared folder, or files of text, conversations or questions
    task: str  # one of FLAGS_OF
    split: str | None
    stride: int | None  # tokens from one window to the next
    delimiter: str | None  # between a question and a choice
    limit: int  # sequences, documents or questions; 0 takes all
    text_column: str | None = None  # of files of text
    template: bool | None = None  # questions and choices as turns; None: if the model answers

    def __post_init__(self):
        for name in dict.fromkeys(name for names in FLAGS_OF.values() for name in names):
            if getattr(self, name) is not None and name not in FLAGS_OF[self.task]:
                tasks = " or ".join(task for task, names in FLAGS_OF.items() if name in names)
                raise UsageError(f"--{name} is for --task {tasks}, but {self.data} is {self.task}")
        if self.text_column is not None:
            require_columns(find_files(self.data), self.text_column)


def evaluate(settings: EvaluationSettings, trained: Trained, scorer: Scorer) -> dict:
    """All numbers, and what was scored with what, for who reads them a month later. Raises
    UsageError, DataError: there is nothing to score, or the model is broken."""
    start = time.perf_counter()
    score = {
        "packed": score_packed,
        "conversations": score_conversations,
        "text": score_text,
        "choice": score_choices,
    }[settings.task]
    result = score(settings, trained, scorer)
    result["seconds"] = seconds = time.perf_counter() - start
    if "tokens" in result:
        result["tokens_per_second"] = result["tokens"] / seconds
    about = {
        "model": str(trained.folder),
        "parameters": trained.n_parameters,
        "max_seq_len": trained.model.config.max_seq_len,
        **asdict(settings),
        "batch_size": scorer.batch_size,
        "dtype": str(scorer.dtype).removeprefix("torch."),
        "device": device_name(scorer.accelerator.device),
        "processes": scorer.accelerator.num_processes,
        "packages": {name: version(name) for name in ("torch", "accelerate", "sentencepiece")},
    }
    return about | result


def data_of_run(source: Path) -> str:
    """The data that the run of these weights was trained on. Raises UsageError: it is not recorded,
    or no longer there."""
    weights = source.resolve()
    for folder in (weights.parent, weights.parent.parent):  # of weights/, of checkpoints/step-N/
        data = saved_arguments(RunFolder(folder)).get("data")
        if isinstance(data, str) and not Path(data).exists():
            where = Path(data).absolute()
            raise UsageError(f"the run was trained on {where}, which is not there: give --data")
        if isinstance(data, str):
            return data
    raise UsageError(f"{source} does not tell which data it was trained on: give --data")


def detect_task(data: str, text_column: str | None = None) -> str:
    """What the path is, by its files and the first line or row of the first. Raises DataError:
    nothing there that could be scored."""
    if (Path(data) / DESCRIPTION_FILE).exists():
        return PREPARED[read_description(data)["kind"]]
    files, text = find_files(data), text_column or TEXT_COLUMN
    by_columns = files[0].endswith(".parquet") and text_column is None
    if by_columns:
        rows = parquet_objects(files[0], (TEXT_COLUMN, *CONVERSATION_KEYS))
        first = next((Record(files[0], *row) for row in rows), None)
    else:
        first = next(read_records(files, Reading(text)), None)
    if first is None:
        raise DataError(f"{files[0]}: an empty file" if len(files) == 1 else f"{data}: no text")
    if not by_columns and not is_jsonl(first.path):
        return "text"
    fields = load_json(first)
    if isinstance(fields, dict) and ("question" in fields or text in fields):
        return "choice" if "question" in fields else "text"
    if isinstance(fields, dict) and fields.keys() & {*CONVERSATION_KEYS}:
        return "conversations"
    raise DataError(f'{first.place}: neither a "{text}" nor a "question" nor a conversation')


def score_packed(settings: EvaluationSettings, trained: Trained, scorer: Scorer) -> dict:
    """Sequences as training reads them. Raises DataError: prepared with another tokenizer, or
    shorter than one sequence."""
    data, split, seq_len = settings.data, settings.split or "val", trained.model.config.max_seq_len
    require_same_tokenizer(settings, trained)
    if not PackedDataset.fits(data, split, seq_len):
        raise DataError(f"{data}: the {split} split is shorter than a sequence of {seq_len}")
    dataset = PackedDataset(data, split, seq_len)
    total = min(settings.limit or len(dataset), len(dataset))
    with progress(scorer, total, "sequence") as bar:
        bos_id = trained.tokenizer.bos_id
        sums = packed_sums(scorer, dataset, settings.limit, bos_id, bar.update)
    return {"split": split, "sequences": total} | summary(sums)


def require_same_tokenizer(settings: EvaluationSettings, trained: Trained) -> None:
    """Raises DataError: a folder was prepared with another tokenizer than the model's."""
    data, tokenizer = settings.data, trained.tokenizer.path
    if read_description(data).get("tokenizer_sha256") != tokenizer_hash(tokenizer):
        raise DataError(
            f"{data} was prepared with another tokenizer than that of {trained.folder}: prepare "
            f"the text with --tokenizer {tokenizer}, or give the text itself"
        )


def score_conversations(settings: EvaluationSettings, trained: Trained, scorer: Scorer) -> dict:
    """The answers in them, of a prepared folder or of files. Raises DataError: prepared with
    another tokenizer, files that cannot be read, or no answer within the context."""
    data, seq_len = settings.data, trained.model.config.max_seq_len
    counts, facts = CutCounts(), {}
    if (Path(data) / DESCRIPTION_FILE).exists():
        require_same_tokenizer(settings, trained)
        facts["split"] = split = settings.split or "val"
        dataset = ConversationSet(data, split, seq_len)
        counts.cut, counts.left_out = dataset.n_cut, dataset.n_left_out
        total = min(settings.limit or len(dataset), len(dataset))
        with progress(scorer, total, "conversation") as bar:
            sums = text_sums(scorer, shown(prepared_rows(dataset, settings.limit), bar))
    elif settings.split is not None:
        raise UsageError(f"--split is for a prepared folder, and {data} is none")
    else:
        with records(settings, scorer, "conversation") as lines:
            rows = conversation_rows(lines, trained.tokenizer, seq_len, counts)
            sums = text_sums(scorer, rows)
    if not sums.n:
        raise DataError(f"{data}: no answer within the context of {seq_len} tokens")
    return facts | vars(counts) | summary(sums) | {"unit": "conversations"}


def shown(rows: Iterable[Row], bar: tqdm) -> Iterator[Row]:
    """The rows, counted by a progress bar."""
    for row in rows:
        yield row
        bar.update()


def score_text(settings: EvaluationSettings, trained: Trained, scorer: Scorer) -> dict:
    """Documents, with a sliding window.

    Raises UsageError: a stride longer than the context. DataError: files that cannot be read, or
    hold no text.
    """
    seq_len = trained.model.config.max_seq_len
    stride = settings.stride or max(1, seq_len // 2)
    if stride > seq_len:
        raise UsageError(f"--stride {stride} leaves tokens out: at most {seq_len}, the context")
    with records(settings, scorer, "document") as documents:
        sums = text_sums(scorer, document_rows(documents, trained.tokenizer, seq_len, stride))
    if not sums.n:
        raise DataError(f"{settings.data}: no document with any text to score")
    return {"stride": stride} | summary(sums)


def score_choices(settings: EvaluationSettings, trained: Trained, scorer: Scorer) -> dict:
    """Questions, answered with the likeliest choice. Raises DataError: files that cannot be read,
    or hold no questions."""
    template = trained.chats if settings.template is None else settings.template
    if template and settings.delimiter is not None:
        raise UsageError("--delimiter is for questions without the template: --no-template")
    delimiter = " " if settings.delimiter is None else settings.delimiter
    counts, seq_len = ChoiceCounts(), trained.model.config.max_seq_len
    how = None if template else delimiter
    with records(settings, scorer, "question") as lines:
        answer(scorer, question_rows(lines, trained.tokenizer, seq_len, how, counts), counts)
    if not counts.n:
        raise DataError(f"{settings.data}: no question in it")
    number = {"units": counts.n, "unit": "questions", "truncated": counts.truncated}
    asked = {"delimiter": how, "template": template}
    return {**asked, **number, "metrics": counts.metrics()}


def progress(scorer: Scorer, total: int | None, unit: str, scale: bool = False) -> tqdm:
    """A bar that one process of all shows."""
    hidden = not scorer.accelerator.is_main_process
    return progress_bar(total, desc="scoring", unit=unit, scale=scale, disable=hidden)


@contextmanager
def records(settings: EvaluationSettings, scorer: Scorer, unit: str) -> Iterator[Iterable[Record]]:
    """The first `limit` records of the files, with a progress bar over them, or their bytes."""
    files = find_files(settings.data)
    total, unit = (settings.limit, unit) if settings.limit else (bytes_to_read(files), "B")
    with progress(scorer, total, unit, scale=not settings.limit) as bar:

        def read() -> Iterator[Record]:
            if settings.task == "conversations":
                found = conversation_records(files)
            else:
                found = read_records(files, Reading(settings.text_column or TEXT_COLUMN))
            for record in islice(found, settings.limit or None):
                yield record
                bar.update(1 if settings.limit else len(record.raw))

        yield read()
