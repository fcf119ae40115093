"""A teacher writes down what it expects at every target of a training split, in the form of
data/teacher_logits.py."""

import json
import math
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from common.atomic import one_at_a_time, remove, write_whole
from common.errors import UsageError
from common.numbers import counted, size
from common.progress import progress_bar
from data.dataset import TokenStream
from data.teacher_logits import (
    BEGUN_FILE,
    DESCRIPTION_FILE,
    FORMAT,
    PART_BYTES,
    differences,
    facts_of,
    part_name,
    parts_of,
    read_recording,
    record_dtype,
    write_part,
)
from evaluation.scoring import Scorer
from model import IGNORE_INDEX
from model.attention import without_cudnn
from runs.manifest import sha256_of
from training.distillation_loss import CHUNK_LOGITS
from training.engine.main_process import on_main_process


@dataclass
class Recorder:
    """All processes must call the same methods; the main one writes.

    Raises UsageError: a k that cannot be.
    """

    scorer: Scorer  # with the teacher
    teacher: str  # its hash
    samples: TokenStream
    k: int
    temperature: float
    _left_out: np.ndarray = field(default_factory=lambda: np.zeros(2))  # of the part being written

    def __post_init__(self):
        self.vocab_size = self.samples.vocab_size  # the model may have room for more
        if not 1 <= self.k <= self.vocab_size:
            raise UsageError(f"--k must be from 1 to {self.vocab_size}, the pieces, not {self.k}")
        self.dtype = record_dtype(self.vocab_size, self.k)

    @property
    def n_targets(self) -> int:
        return self.samples.targets_before(len(self.samples))

    def record(self, out: Path, overwrite: bool = False) -> dict:
        """Write the folder, or what is missing of it where another process of the same was stopped;
        returns its description. Raises UsageError: see `begin`."""
        is_main = self.scorer.accelerator.is_main_process
        with one_at_a_time(out) if is_main else nullcontext():
            return self._record(out, overwrite, is_main)

    def _record(self, out: Path, overwrite: bool, is_main: bool) -> dict:
        description = on_main_process(self.scorer.accelerator, lambda: self.begin(out, overwrite))
        parts = parts_of(self.samples, description["samples_per_part"])
        done = len(description["parts"])
        with progress_bar(self.n_targets, "recording", "target", True, disable=not is_main) as bar:
            bar.update(sum(count for _, count in parts[:done]))
            for number, (part, _) in enumerate(parts[done:], done):
                records = self._records(part, bar)
                if not is_main:
                    deque(records, maxlen=0)
                    continue
                sha256 = write_part(out / part_name(number), records)
                mass, nats = self._left_out.tolist()
                description["parts"].append({"sha256": sha256, "mass": mass, "nats": nats})
                write_whole(out / BEGUN_FILE, json.dumps(description, indent=1))
        if is_main and (out / BEGUN_FILE).exists():
            (out / BEGUN_FILE).rename(out / DESCRIPTION_FILE)
        return description

    def begin(self, out: Path, overwrite: bool) -> dict:
        """What describes the folder as it is, with the parts that are there, which may be all; and
        say how much there is to write. From one that is missing or damaged on, they are written
        again. Raises UsageError, DataError: the folder is something else, or the disk has too
        little room."""
        total = self.n_targets * self.dtype.itemsize
        dtype = str(self.scorer.dtype).removeprefix("torch.")
        of_teacher = {"teacher": self.teacher, "vocab_size": self.vocab_size, "dtype": dtype}
        facts = of_teacher | {"k": self.k, "temperature": self.temperature}
        facts |= facts_of(self.samples)
        saved = read_recording(out)
        if out.exists() and not saved and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} exists and is no recording of a teacher: choose another --out")
        other = differences(saved, facts) if saved else ""
        if other and not overwrite:
            raise UsageError(
                f"{out} is another recording ({other}): pass --overwrite to replace it, or another "
                "--out"
            )
        per_part = max(1, PART_BYTES * len(self.samples) // total)
        begun = {"format": FORMAT, **facts, "folder": str(self.samples.folder)}
        begun |= {"samples_per_part": per_part, "parts": []}
        description = begun if other else saved or begun
        parts = parts_of(self.samples, description["samples_per_part"])
        listed = description["parts"]
        done = next((i for i, part in enumerate(listed) if not is_there(out, i, part)), len(listed))
        needed = sum(count for _, count in parts[done:]) * self.dtype.itemsize
        there = next(path for path in (out, *out.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        said = f"{size(total)}, {self.dtype.itemsize} bytes for each of {self.n_targets:,} targets"
        if needed > free:
            raise UsageError(
                f"{out} takes {said}, and {size(free)} are free: take a smaller --k or make room"
            )
        print(f"{out}: {said}; {size(free)} are free", flush=True)
        if done:
            print(f"{out}: {done} of {counted(len(parts), 'parts')} are there already", flush=True)
        if done < len(listed):
            print(f"{out / part_name(done)}: missing or damaged, written again", flush=True)
            description = description | {"parts": listed[:done]}
        if other:
            remove(out)
        out.mkdir(parents=True, exist_ok=True)
        if description is not saved:
            write_whole(out / BEGUN_FILE, json.dumps(description, indent=1))
            (out / DESCRIPTION_FILE).unlink(missing_ok=True)
        return description

    def _records(self, part: range, bar: tqdm) -> Iterator[np.ndarray]:
        """The records of these samples; adds to `_left_out`, from nothing."""
        self._left_out[:] = 0
        scorer, accelerator = self.scorer, self.scorer.accelerator
        collate = getattr(self.samples, "collate", None)
        loader = DataLoader(Subset(self.samples, part), scorer.batch_size, collate_fn=collate)
        for tokens, targets in prepare_data_loader(loader, accelerator.device, put_on_device=True):
            autocast = torch.autocast(
                accelerator.device.type, torch.bfloat16, scorer.dtype == torch.bfloat16
            )
            with torch.inference_mode(), autocast, without_cudnn():
                logits = scorer.model(tokens).logits
                found = [x.unflatten(0, targets.shape) for x in self._expected(logits)]
            found = ((targets != IGNORE_INDEX).byte(), *found)
            # Rows of another process may be padded to another length.
            found = [accelerator.pad_across_processes(x, dim=1) for x in found]
            counts, *found = accelerator.gather_for_metrics(found)
            ids, logarithms, left_out = (x[counts.bool()].cpu().numpy() for x in found)
            if not np.isfinite(left_out).all():
                raise UsageError("what the teacher says is not a number: its weights are broken")
            records = np.empty(len(ids), self.dtype)
            records["ids"], records["log_probabilities"] = ids, logarithms
            self._left_out += left_out.sum(0, dtype=np.float64)
            bar.update(len(records))
            yield records

    def _expected(self, logits: Tensor) -> list[Tensor]:
        """Ids, logarithms and `left_out` of all tokens, with so many logits in fp32 at a time as
        training has."""
        logits = logits[..., : self.vocab_size].flatten(0, 1)
        chunks = logits.split(max(1, CHUNK_LOGITS // self.vocab_size))
        found = (likeliest(chunk, self.k, self.temperature) for chunk in chunks)
        return [torch.cat(each) for each in zip(*found, strict=True)]


def is_there(out: Path, number: int, part: dict) -> bool:
    """Whether a part is what was written."""
    path = out / part_name(number)
    return path.is_file() and sha256_of(path) == part["sha256"]


def likeliest(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """What is kept of (tokens, vocab_size) logits, and what is not.

    Returns:
        Ids (tokens, k) and logarithms (tokens, k + 1, or k of k pieces), see `TopK`; and (tokens,
        2) the probability of all other pieces together, and what the divergence of a student loses
        that takes these for equally likely, in nats.
    """
    log_probabilities = (logits.float() / temperature).log_softmax(-1)
    kept, ids = log_probabilities.topk(k)
    n_others = logits.shape[-1] - k
    if not n_others:
        return ids, kept, kept.new_zeros(len(kept), 2)
    others = log_probabilities.scatter(-1, ids, -torch.inf)
    together = others.logsumexp(-1, keepdim=True)
    among = (others - together).exp()
    lost = math.log(n_others) - torch.special.entr(among).sum(-1, keepdim=True)
    mass = together.exp()
    return ids, torch.cat([kept, together], -1), torch.cat([mass, mass * lost], -1)


def summary(description: dict, n_targets: int) -> str:
    """What k pieces keep and lose, for people."""
    mass, nats = (
        sum(part[name] for part in description["parts"]) / n_targets for name in ("mass", "nats")
    )
    k, vocab_size = description["k"], description["vocab_size"]
    return (
        f"{n_targets:,} targets, {k:,} of {vocab_size:,} pieces each: {mass:.2%} of the "
        f"probability at temperature {description['temperature']:g} is the others'; a student that "
        f"takes those for equally likely misses {nats:.4f} nats of divergence per target"
    )
