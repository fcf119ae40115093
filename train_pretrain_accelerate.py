"""Pretrain a small Llama-like model on packed tokens.

    accelerate launch --config_file accelerate_config.yaml train_pretrain_accelerate.py --batch_size
    24 ...

Reads what `python -m scripts.prepare_data` wrote, trains through Accelerate on whatever engine the
launcher chose (DeepSpeed ZeRO, DDP, or a single process) and leaves everything in one run folder. A
step always means an optimizer step; a micro-batch is what one process feeds forward at once.
"""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from data.dataset import PackedDataset
from data.errors import DataError
from data.order import MicroBatchSampler
from model import ConfigError, LMConfig, Transformer
from training.arguments import TrainingArguments, parse_arguments
from training.checkpoint import fp32_weights, load_checkpoint, save_checkpoint
from training.engine import build_engine
from training.errors import UsageError, one_line_errors
from training.evaluation import evaluate, validation_loader
from training.finish import finish
from training.metrics import TrainingLog
from training.optimizer import build_optimizer, set_learning_rate
from training.profiler import StepProfiler
from training.run_folder import choose_run, seed_everything
from training.schedule import LearningRate
from training.summary import start_block
from training.trackers import require_trackers, start_trackers


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("train_pretrain_accelerate.py", UsageError, ConfigError, DataError):
        args, model_settings = parse_arguments(argv)
        train(args, model_settings)


def train(args: TrainingArguments, model_settings: dict) -> None:
    require_trackers(args.trackers)
    engine = build_engine(args)
    accelerator = engine.accelerator
    train_set, val_set = open_data(args, model_settings["max_seq_len"], accelerator)
    config = LMConfig(**model_settings | {"vocab_size": train_set.vocab_size})
    run, checkpoint = choose_run(args, accelerator)

    seed_everything(args.seed)  # the same initial weights on every process
    model = Transformer(config)
    flops_per_token = model.flops_per_token(config.max_seq_len)
    optimizer = build_optimizer(model, args, accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    seed_everything(
        args.seed, rank=accelerator.process_index
    )  # other dropout masks on every process

    samples_per_step = args.batch_size * args.accumulation_steps * accelerator.num_processes
    total_steps = args.max_steps or math.ceil(args.epochs * len(train_set) / samples_per_step)
    learning_rate = LearningRate.from_arguments(args, total_steps)
    step = load_checkpoint(checkpoint, accelerator, model, optimizer)["step"] if checkpoint else 0
    batches = micro_batches(train_set, args, accelerator, start=step * samples_per_step)
    val_loader = val_set and validation_loader(
        val_set, args.batch_size, args.eval_samples, accelerator
    )

    block = start_block(
        args, config, engine, train_set, val_loader, model, learning_rate, run, checkpoint
    )
    run.write_settings(args, config, engine)
    start_trackers(accelerator, args.trackers, run.path, vars(args) | config.to_dict())
    if accelerator.is_main_process:
        print(block, flush=True)
    log = TrainingLog(
        accelerator,
        run.metrics,
        args.log_interval,
        tokens_per_step=samples_per_step * config.max_seq_len,
        flops_per_token=flops_per_token,
        total_steps=total_steps,
        first_step=step + 1,
    )
    profiler = StepProfiler(accelerator, model, run.profile, args)

    model.train()
    while step < total_steps:
        step += 1
        set_learning_rate(
            optimizer, learning_rate(step)
        )  # now, for DeepSpeed steps inside backward
        profiler.begin_step(step)
        grad_norm = optimizer_step(args, accelerator, model, optimizer, batches, profiler, log)
        with log.pause():
            profile = profiler.end_step(step)
        log.step(
            step, learning_rate(step), grad_norm, epoch=step * samples_per_step / len(train_set)
        )
        if profile:
            log.profile(step, *profile)
        if val_loader and due(step, args.eval_interval, total_steps):
            with log.pause():
                log.validation(
                    step, evaluate(model, val_loader, accelerator, val_set.bytes_per_token)
                )
        if due(step, args.save_interval, total_steps):
            with log.pause():
                save_checkpoint(run.checkpoint(step), accelerator, model, optimizer, {"step": step})
                log.say(f"step {step}/{total_steps}  saved {run.checkpoint(step)}")

    weights = fp32_weights(accelerator, model, optimizer)
    log.close()
    if accelerator.is_main_process:
        finish(args, run, config, weights, train_set)
    accelerator.end_training()


def optimizer_step(
    args: TrainingArguments,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    profiler: StepProfiler,
    log: TrainingLog,
) -> Tensor | float | None:
    """All micro-batches of one step and the update; returns the gradient's norm before clipping."""
    for _ in range(args.accumulation_steps):
        with profiler.phase("data"):
            tokens, targets = next(batches)
        # `accumulate` averages gradients over the micro-batches and lets the last one alone trigger
        # the update.
        with accelerator.accumulate(model):
            with profiler.phase("forward"):
                loss = model(tokens, targets).loss
            with profiler.phase("backward"):
                accelerator.backward(loss)
            with profiler.phase("optimizer"):
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(
                        model.parameters(), args.grad_clip or math.inf
                    )
                optimizer.step()
                optimizer.zero_grad()
        log.micro_batch(loss.detach())
    return grad_norm


def due(step: int, interval: int, total_steps: int) -> bool:
    """Every `interval` steps, never if it is 0, and at the last step in any case."""
    return step == total_steps or (interval > 0 and step % interval == 0)


def open_data(
    args: TrainingArguments, seq_len: int, accelerator: Accelerator
) -> tuple[PackedDataset, PackedDataset | None]:
    """Training and validation split; the built-in corpus is prepared first where that has not
    happened yet.

    Raises:
        DataError: anything wrong with the prepared data.
    """
    if (
        accelerator.is_main_process
        and not Path(args.data).exists()
        and args.data == TrainingArguments.data
    ):
        print(f"no packed data in {args.data} yet: preparing the built-in corpus", flush=True)
        command = [
            sys.executable,
            "-m",
            "scripts.prepare_data",
            "--data",
            "builtin",
            "--out",
            args.data,
        ]
        if subprocess.run(command).returncode:
            raise DataError(f"{args.data}: the built-in corpus could not be prepared")
    accelerator.wait_for_everyone()
    train_set = PackedDataset(args.data, "train", seq_len)
    has_validation = train_set.description["splits"]["val"]["tokens"] > 0
    val_set = PackedDataset(args.data, "val", seq_len) if has_validation else None
    if accelerator.is_local_main_process:
        train_set.scan()
    return train_set, val_set


def micro_batches(
    train_set: PackedDataset, args: TrainingArguments, accelerator: Accelerator, start: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets), each (batch_size, max_seq_len), for this process on its device.

    `start` is the number of samples that all processes together have consumed before.
    """
    sampler = MicroBatchSampler(
        len(train_set),
        args.batch_size,
        accelerator.process_index,
        accelerator.num_processes,
        args.seed,
        start,
    )
    on_gpu = accelerator.device.type == "cuda"
    # With a generator of its own the loader draws nothing from the global one, which drives
    # dropout.
    loader = DataLoader(
        train_set,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=on_gpu,
        generator=torch.Generator(),
    )
    for tokens, targets in loader:
        yield (
            tokens.to(accelerator.device, non_blocking=on_gpu),
            targets.to(accelerator.device, non_blocking=on_gpu),
        )


if __name__ == "__main__":
    main()
