"""In place of a teacher, what one has written down (data/teacher_logits.py): it comes with each
micro-batch, so that nothing is built and nothing computed."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from data.dataset import TokenStream
from data.teacher_logits import RecordedSet, TopK, finished_recording, identity_of
from training.arguments import Arguments, TrainingArguments
from training.engine.kinds import DDP
from training.engine.launch import Engine
from training.engine.workload import Beside, Parameters


@dataclass(frozen=True)
class Recording:
    """As `TeacherWeights`: found, and not yet in use."""

    folder: Path
    temperature: float
    description: dict

    # It has no weights, but logits of the student's size are compared with it.
    beside = Beside(Parameters(0, matrices=0, block=0, sizes={}, flops_per_token=0), DDP)

    @classmethod
    def find(cls, args: TrainingArguments) -> "Recording":
        """Raises DataError: there is none, or it is not finished."""
        folder = Path(args.teacher_logits)
        return cls(folder, args.temperature, finished_recording(folder))

    def named_in(self, args: Arguments) -> Arguments:
        """With its path, and the data that were recorded, unless others were named."""
        data = args.data or self.description["folder"]
        return replace(args, teacher=None, teacher_logits=str(self.folder), data=data)

    def flops_per_token(self, seq_len: float) -> float:
        return 0

    def sha256(self) -> str:
        """Of what this process finds there: `description` is what the main one has found."""
        return identity_of(finished_recording(self.folder))

    def require_processes(self) -> None:
        """It takes none."""

    def open(self, samples: TokenStream) -> RecordedSet:
        """Raises DataError: it is not of these samples, or not for this training."""
        asked = {"temperature": self.temperature, "vocab_size": samples.vocab_size}
        return RecordedSet(samples, self.folder, asked)

    require_fit = open

    def build(
        self, sha256: str, engine: Engine, dtype: str, samples: TokenStream
    ) -> "RecordedTeacher":
        """As `TeacherWeights.build`."""
        return RecordedTeacher(self, sha256, self.open(samples))

    def __str__(self) -> str:
        about = self.description
        return (
            f"{self.folder}: the {about['k']:,} likeliest of {about['vocab_size']:,} pieces at "
            f"temperature {about['temperature']:g}, written down by teacher {about['teacher'][:16]}"
        )


class RecordedTeacher:
    def __init__(self, found: Recording, sha256: str, samples: RecordedSet):
        self.found, self.sha256, self.samples = found, sha256, samples
        self.answer: TopK | None = None  # to the micro-batch that has just been taken

    def __call__(self, tokens: Tensor) -> TopK:
        return self.answer
