"""Write down once what a teacher expects at every target of a training split, for many students.

    python -m scripts.teacher_logits RUN               # for the data that it was trained on
    python -m scripts.teacher_logits RUN --data out/data/NAME --out out/teacher_logits/NAME
    accelerate launch --multi_gpu --num_processes 2 -m scripts.teacher_logits RUN

`train_distillation_accelerate.py --teacher_logits out/teacher_logits/NAME` then needs no teacher.
Kept are the k likeliest pieces with their probabilities, and that of all others together. Where
this is stopped, the same command goes on.
"""

import argparse
from pathlib import Path

from common.errors import UsageError, one_line_errors, stop_in_order
from common.parser import OneLineParser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.teacher_logits", description=__doc__)
    add = parser.add_argument
    what = (
        "teacher: run folder, RUN@best, checkpoint, folder of weights (Hugging Face's too), 'auto'"
    )
    add("teacher", metavar="RUN", help=what)
    text = "folder made by scripts.prepare_data (default: what the teacher was trained on)"
    add("--data", help=text)
    where = "folder to write (default: out/teacher_logits/ and the name of the data)"
    add("--out", type=Path, help=where)
    add("--k", type=int, default=64, help="pieces to keep of each target's (default: 64)")
    heat = "that of the student's training (default: 2)"
    add("--temperature", type=float, default=2.0, help=heat)
    length = "that of the student's training (default: the teacher's, unless it is Hugging Face's)"
    add("--max_seq_len", type=int, help=length)
    add("--batch_size", type=int, default=16, help="rows per process at a time")
    autocast = "of the teacher, bfloat16 by autocast (default: bfloat16, as in training)"
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help=autocast)
    devices = ("auto", "cpu", "cuda")
    add("--device", choices=devices, default="auto", help="auto is a GPU if there is one")
    add("--overwrite", action="store_true", help="replace another recording")
    args = parser.parse_args(argv)
    for name in ("k", "max_seq_len", "batch_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, not {value}")
    if not 0 < args.temperature < float("inf"):
        parser.error(f"--temperature must be positive and finite, not {args.temperature}")
    return args


def record(args: argparse.Namespace) -> None:
    from evaluation.scoring import build_scorer
    from evaluation.teacher_logits import Recorder, summary
    from runs.find import PRETRAINING, data_of
    from runs.weights import WeightsFolder
    from training.distillation_arguments import DistillationArguments
    from training.engine.zero_inference import ZeroInference
    from training.teacher import TeacherWeights

    zero = ZeroInference.of_launch(args.device)
    source = WeightsFolder.find(args.teacher, PRETRAINING, foreign=True)
    config = source.config()
    if source.is_foreign and args.max_seq_len is None:
        raise UsageError(
            f"--max_seq_len is missing, that of the student's training: the {config.max_seq_len:,} "
            f"tokens that {source.path} reads are more than memory may hold"
        )
    data, seq_len = args.data or data_of(str(source.path)), args.max_seq_len or config.max_seq_len
    samples = DistillationArguments(data=data).dataset(data, "train", seq_len)
    TeacherWeights(source, config, zero).require_fit(samples)
    model = zero.load(source) if zero else source.load()
    scorer = build_scorer(model, args.batch_size, args.device, args.dtype)
    recorder = Recorder(scorer, source.sha256(), samples, args.k, args.temperature)
    out = args.out or Path("out/teacher_logits") / Path(data).resolve().name
    description = recorder.record(out, args.overwrite)
    if scorer.accelerator.is_main_process:
        print(summary(description, recorder.n_targets))
    scorer.accelerator.end_training()


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors("teacher_logits", UsageError):
        args = parse_arguments(argv)
    from model.config import ConfigError  # not above: --help need not wait seconds for torch

    with one_line_errors("teacher_logits", UsageError, ConfigError, OSError):
        record(args)


if __name__ == "__main__":
    main()
    from training.interruption import leave

    leave()
