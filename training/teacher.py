"""A trained model whose expectations another one learns; it never changes.

Every process has all of it, or with --teacher_config its share under ZeRO-3 (`zero_inference`),
whichever engine the student has. Accelerate is told of the student alone: a second plugin would
have it prepare a model that has no optimizer, and with that overwrite the accumulation of the
first, and fail to save either.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from common.errors import UsageError
from data.dataset import TokenStream
from data.tokenizer import tokenizer_hash
from model import LMConfig, Transformer
from runs.find import PRETRAINING
from runs.weights import WeightsFolder
from training.arguments import Arguments, TrainingArguments
from training.engine.deepspeed_config import read_config
from training.engine.kinds import DDP, kind_of
from training.engine.launch import Engine
from training.engine.main_process import on_every_process
from training.engine.workload import Beside, Parameters
from training.engine.zero_inference import ZeroInference
from training.resume import with_own_teacher


@dataclass(frozen=True)
class TeacherWeights:
    """A teacher that has been found, and not been built."""

    source: WeightsFolder
    config: LMConfig
    zero: ZeroInference | None  # None: every process has all of it

    @classmethod
    def find(cls, args: TrainingArguments) -> "TeacherWeights | None":
        """None where nobody teaches. Raises UsageError: no weights there, or a DeepSpeed file that
        cannot serve. ConfigError: a shape that cannot be read."""
        if args.teacher is None:
            return None
        source = WeightsFolder.find(args.teacher, PRETRAINING, foreign=True)
        zero = None
        if path := args.teacher_config:
            config = read_config(path)
            if (stage := config["zero_optimization"].get("stage")) != 3:
                raise UsageError(
                    f'{path}: "zero_optimization.stage" is {stage!r}, and a teacher is divided by '
                    "3 alone: see configs/zero3_inference.json"
                )
            # Else DeepSpeed would exchange PyTorch's own linear layer, of the student too.
            config["zero_optimization"]["memory_efficient_linear"] = False
            zero = ZeroInference.of_config(config, path, args.dtype)
        return cls(source, source.config(), zero)

    def named_in(self, args: Arguments) -> Arguments:
        """With its path, whatever it was called by."""
        return replace(args, teacher=str(self.source.path))

    def sha256(self) -> str:
        """Of its weights."""
        return self.source.sha256()

    @cached_property
    def beside(self) -> Beside:
        """What it adds to a process's memory."""
        return Beside(Parameters.of(self.config), kind_of(self.zero.config) if self.zero else DDP)

    def flops_per_token(self, seq_len: float) -> float:
        """Of its forward pass, a third of what `Transformer.flops_per_token` counts."""
        with torch.device("meta"):
            return Transformer(self.config).flops_per_token(seq_len) / 3

    def require_fit(self, data: TokenStream) -> None:
        """Raises UsageError: the teacher does not read what the student reads, or cannot say all
        that stands there; names both."""
        path, tokenizer = self.source.path, self.source.tokenizer
        if not tokenizer.is_file():
            raise UsageError(
                f"the teacher in {path} has no tokenizer beside it: nothing tells whether it is "
                f"that of {data.folder}"
            )
        if tokenizer_hash(tokenizer) != data.description["tokenizer_sha256"]:
            raise UsageError(
                f"{data.folder} has another tokenizer than the teacher in {path}: "
                f"{data.prepare_with(tokenizer)}"
            )
        if self.config.vocab_size < data.vocab_size:  # more are room that no token takes
            raise UsageError(
                f"the teacher in {path} has an output of {self.config.vocab_size} pieces, its "
                f"tokenizer {data.vocab_size}: they do not belong together"
            )
        if self.config.max_seq_len < data.seq_len:
            raise UsageError(
                f"the teacher in {path} reads {self.config.max_seq_len} tokens at most, the "
                f"student {data.seq_len}: pass --max_seq_len {self.config.max_seq_len}, or another "
                "--teacher"
            )

    def require_processes(self) -> None:
        """Raises UsageError: there are none to divide it among."""
        if self.zero and not torch.distributed.is_initialized():
            raise UsageError(
                "--teacher_config divides the teacher among a launcher's processes, and here is no "
                "launcher: leave it out, or accelerate launch --config_file accelerate_config.yaml"
            )

    def build(self, sha256: str, engine: Engine, dtype: str, samples: TokenStream) -> "Teacher":
        """For a student that reads these samples, checked by `require_fit`; see `Teacher`."""
        return Teacher(self, sha256, engine, dtype, samples.vocab_size)


def find_teacher(args: TrainingArguments) -> TeacherWeights | None:
    """Raises UsageError, ConfigError: as `TeacherWeights.find`."""
    return TeacherWeights.find(with_own_teacher(args))


class Teacher:
    """Built, on its device, in the precision of training's forward pass. All processes must make it
    and ask it together; to make it draws random numbers. It is asked of the first `vocab_size`
    pieces; where its output has room for more, no text has those.

    Raises UsageError, ConfigError: its weights cannot be read.
    """

    def __init__(
        self, found: TeacherWeights, sha256: str, engine: Engine, dtype: str, vocab_size: int
    ):
        self.found, self.sha256, self.vocab_size = found, sha256, vocab_size
        if found.zero:
            model = found.zero.load(found.source)
        else:
            device = engine.accelerator.device
            model = on_every_process(engine, lambda: whole(found.source, dtype, device))
        self.model = model.requires_grad_(False).eval()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Its logits, (B, T, vocab_size), for tokens (B, T) of which all processes have as many."""
        return self.model(tokens).logits[..., : self.vocab_size]

    @property
    def held(self) -> int:
        """Bytes of its weights that this process has, on whatever device."""
        shares = (getattr(p, "ds_tensor", p) for p in self.model.parameters())
        return sum(share.numel() * share.element_size() for share in shares)


def whole(source: WeightsFolder, dtype: str, device: torch.device) -> Transformer:
    """The model on the device, where it is never in another precision. Raises ConfigError: files
    that are damaged or do not fit each other."""
    weights, config = source.sound_tensors(), source.config()
    with torch.device("meta"):
        model = Transformer(config).to(getattr(torch, dtype))
    model.to_empty(device=device)
    if config.tie_embeddings:  # `to_empty` has made two of one
        model.output.weight = model.tok_embeddings.weight
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])
    return model
