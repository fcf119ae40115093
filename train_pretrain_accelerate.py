"""Pretrain a small Llama-like model on packed tokens.

    accelerate launch --config_file accelerate_config.yaml train_pretrain_accelerate.py [flags]

Reads what `python -m scripts.prepare_data` wrote, trains through Accelerate on whatever engine the
launcher chose (DeepSpeed ZeRO, DDP, or a single process) and leaves everything in one run folder. A
step always means an optimizer step; a micro-batch is what one process feeds forward at once.
"""

from training.errors import UsageError, one_line_errors  # isort: skip  first, for Ctrl-C

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from data.dataset import PackedDataset
from data.errors import DataError
from data.order import MicroBatchSampler
from model import ConfigError, LMConfig, Transformer
from training.agreement import on_main_process
from training.arguments import TrainingArguments, parse_arguments
from training.checkpoint import Checkpointer, load_checkpoint, space_warning
from training.compilation import compile_blocks, plan
from training.engine import Engine, build_engine
from training.evaluation import evaluate, validation_loader
from training.finish import finish
from training.guest import guest
from training.initial_weights import InitialWeights
from training.interruption import StopRequest, leave, report_interruption
from training.metrics import TrainingLog
from training.optimizer import build_optimizer, set_learning_rate, tell_layout
from training.profiler import StepProfiler
from training.resume import (
    Choice,
    choose_run,
    describe_bad_steps,
    describe_finished,
    reconcile,
    run_identity,
    set_aside,
)
from training.run_folder import RunFolder, seed_everything
from training.samples import SampleWriter
from training.schedule import LearningRate
from training.splits import open_splits
from training.state import TrainingState
from training.summary import start_block
from training.trackers import require_trackers, start_trackers

FEW_STEPS = 50
PROGRAM = "train_pretrain_accelerate.py"


def main(argv: list[str] | None = None) -> None:
    """Train as the flags say: those in argv, and then the process lives on, or the command line's.

    A notebook calls it through `accelerate.notebook_launcher(main, args=(argv,))`.
    """
    expected = (UsageError, ConfigError, DataError)
    with one_line_errors(PROGRAM, *expected), guest(PROGRAM, argv):
        args, model_settings = parse_arguments(argv)
        train(args, model_settings)


def train(args: TrainingArguments, model_settings: dict) -> None:
    run = set_up(args, model_settings)
    if run is None:
        return
    accelerator, log, checkpointer = run.accelerator, run.log, run.checkpointer
    step, total_steps = run.first_step - 1, run.learning_rate.total_steps
    run.model.train()
    while step < total_steps:
        step += 1
        rate = run.learning_rate(step)
        set_learning_rate(run.optimizer, rate)  # now, for DeepSpeed steps inside backward
        run.profiler.begin_step(step)
        grad_norm = optimizer_step(run)
        with log.pause():  # not training: throughput leaves it out
            profile = run.profiler.end_step(step)
        log.step(step, rate, grad_norm, epoch=step * run.samples_per_step / len(run.train_set))
        if profile:
            log.profile(step, *profile)
        if log.bad_in_row >= args.max_bad_steps:
            checkpointer.wait()
            path = run.folder.bad_samples if accelerator.is_main_process else None
            count, samples = log.bad_in_row, run.samples_per_step
            raise UsageError(describe_bad_steps(count, step, run.sampler, samples, path))

        val_loss = None
        if run.val_loader and due(step, args.eval_interval, total_steps):
            with log.pause():
                result = evaluate(run.model, run.val_loader, accelerator, run.bytes_per_token)
            log.validation(step, result)
            val_loss = result["loss"]
        with log.pause():
            run.samples.write(step)
        interruption = run.stop.reason()
        if interruption or due(step, args.save_interval, total_steps):
            with log.pause():
                checkpointer.save(step, val_loss)
        checkpointer.poll()
        if interruption and step < total_steps:
            saved = checkpointer.wait()
            log.close()
            report_interruption(interruption, step, run.folder, saved, accelerator)
            return

    saved = checkpointer.wait()
    weights = run.state.weights()
    log.close()
    if accelerator.is_main_process:
        finish(args, run.folder, run.config, weights, run.samples.prompt_from)
        if not saved:
            raise UsageError(
                f"{run.folder.path}: the weights are there, the last checkpoint is not"
            )
    accelerator.end_training()


def optimizer_step(run: "Run") -> float:
    """All micro-batches of one step and the update; returns the gradient's norm before clipping.

    Where that is not finite, the update is left out: DeepSpeed and fp16's loss scaling see to it
    themselves.
    """
    accelerator, model, profiler, grad_norm = run.accelerator, run.model, run.profiler, 0.0
    for _ in range(run.args.accumulation_steps):
        with profiler.phase("data"):
            tokens, targets = next(run.batches)
        # `accumulate` averages gradients over the micro-batches; the last one alone has an update.
        with accelerator.accumulate(model):
            with profiler.phase("forward"):
                loss = model(tokens, targets).loss
            with profiler.phase("backward"):
                accelerator.backward(loss)
            with profiler.phase("optimizer"):
                if accelerator.sync_gradients:
                    max_norm = run.args.grad_clip or math.inf
                    grad_norm = float(accelerator.clip_grad_norm_(model.parameters(), max_norm))
                if math.isfinite(grad_norm) or accelerator.scaler is not None:
                    run.optimizer.step()
                run.optimizer.zero_grad()
        run.log.micro_batch(loss.detach())
    return grad_norm


@dataclass
class Run:
    """Everything that the loop uses, made by `set_up`."""

    args: TrainingArguments  # as given, but for accumulation_steps on another number of processes
    config: LMConfig
    folder: RunFolder
    accelerator: Accelerator
    model: torch.nn.Module  # as prepared, like the optimizer
    optimizer: Any
    state: TrainingState
    train_set: PackedDataset
    sampler: MicroBatchSampler
    batches: Iterator[tuple[Tensor, Tensor]]
    val_loader: DataLoader | None
    bytes_per_token: float  # of the validation text
    samples_per_step: int
    first_step: int
    learning_rate: LearningRate
    log: TrainingLog
    profiler: StepProfiler
    samples: SampleWriter
    checkpointer: Checkpointer
    stop: StopRequest


def set_up(args: TrainingArguments, model_settings: dict) -> Run | None:
    """Build everything, resume where asked, and say what is in use; None if the run is finished.

    Raises:
        UsageError, ConfigError, DataError: this cannot be trained.
    """
    started = time.monotonic()  # --time_limit counts from here
    require_trackers(args.trackers)
    # What trains, and on what.
    engine = build_engine(args)
    accelerator = engine.accelerator
    initial = on_main_process(accelerator, InitialWeights.find, args.init_from, model_settings)
    train_set, val_set = open_splits(args, initial.max_seq_len, accelerator)
    config = initial.config(train_set)
    # A new run or an old one, and how many steps.
    choice = choose_run(args, accelerator)
    identity = run_identity(config, train_set, args, accelerator.num_processes)
    if choice.checkpoint:
        reconcile(choice, engine, args, identity)
    samples_per_step = identity["global_batch"]
    total_steps = args.max_steps or math.ceil(args.epochs * len(train_set) / samples_per_step)
    if choice.step >= total_steps and choice.folder.weights.exists():
        accelerator.print(describe_finished(choice, total_steps))
        accelerator.end_training()
        return None

    # The model, with the weights of a checkpoint, of another run, or drawn at random.
    tokens_per_step = samples_per_step * config.max_seq_len
    run_tokens, recorded = tokens_per_step * total_steps, choice.state.get("compiled")
    flops_per_token, compiled, why = plan(config, args.compile, recorded, run_tokens, accelerator)
    model, optimizer = build_model(config, args, accelerator, compiled)
    state = TrainingState(accelerator, model, optimizer)
    if initial.source and not choice.checkpoint:
        state.load_weights(initial.load(), str(initial.source.folder))
        choice.new_weights = initial.describe()
    first_step = choice.step + 1
    work = (tokens_per_step, flops_per_token, total_steps, first_step)
    log = TrainingLog(accelerator, choice.folder.metrics, args.log_interval, *work)
    if choice.checkpoint:
        load_checkpoint(choice.checkpoint, state, log)
    sampler = build_sampler(train_set, args, accelerator, choice.step * samples_per_step)
    val_loader = val_set and validation_loader(
        val_set, args.batch_size, args.eval_samples, accelerator
    )
    run = Run(
        args=args,
        config=config,
        folder=choice.folder,
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        state=state,
        train_set=train_set,
        sampler=sampler,
        batches=micro_batches(train_set, sampler, args.num_workers, accelerator.device),
        val_loader=val_loader,
        bytes_per_token=val_set.bytes_per_token if val_set else 0.0,
        samples_per_step=samples_per_step,
        first_step=first_step,
        learning_rate=LearningRate.from_arguments(args, total_steps),
        log=log,
        profiler=StepProfiler(accelerator, model, choice.folder.profile, args),
        samples=SampleWriter(args, choice.folder.samples, model, val_set or train_set, log),
        checkpointer=Checkpointer(choice.folder, state, args.keep_last, identity, log, compiled),
        stop=StopRequest(accelerator, args.time_limit, since=started),
    )
    announce(run, engine, choice, f"{'yes' if compiled else 'no'} ({why})")
    return run


def announce(run: Run, engine: Engine, choice: Choice, compiled: str) -> None:
    """Say and write down what is in use, to people, settings.json and trackers."""
    model = run.accelerator.unwrap_model(run.model)
    data, rate = (run.train_set, run.val_loader), run.learning_rate
    run.log.say(start_block(run.args, run.config, engine, *data, model, rate, choice, compiled))
    if rate.total_steps < FEW_STEPS:
        run.log.say(
            f"WARNING: {rate.total_steps} steps are hardly training; a smaller global batch "
            "(--batch_size, --accumulation_steps), more --epochs or more text give more"
        )
    if warning := space_warning(run.folder, model.num_parameters(), run.args.keep_last):
        run.log.say(warning)
    if run.accelerator.is_main_process:
        set_aside(choice)
    run.folder.write_settings(run.args, run.config, engine, run.train_set.tokenizer_path)
    start_trackers(run.accelerator, run.args, run.folder.path, run.config, run.first_step)


def build_model(
    config: LMConfig, args: TrainingArguments, accelerator: Accelerator, compiled: bool = False
) -> tuple[torch.nn.Module, Any]:
    """Model and optimizer, prepared for the engine, and the random generators seeded."""
    seed_everything(args.seed)  # the same initial weights on every process
    model = Transformer(config)
    if compiled:
        compile_blocks(model)
    optimizer = build_optimizer(model, args, accelerator)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
    except (ValueError, AssertionError) as error:  # what DeepSpeed has against its configuration
        raise UsageError(f"the engine cannot be started: {error}") from error
    tell_layout(model, accelerator)
    seed_everything(args.seed, rank=accelerator.process_index)  # other dropout masks on each
    return model, optimizer


def build_sampler(
    train_set: PackedDataset, args: TrainingArguments, accelerator: Accelerator, consumed: int
) -> MicroBatchSampler:
    """This process's samples, after so many that all processes together have consumed."""
    position = (args.batch_size, accelerator.process_index, accelerator.num_processes)
    return MicroBatchSampler(len(train_set), *position, seed=args.seed, start=consumed)


def due(step: int, interval: int, total_steps: int) -> bool:
    """Every `interval` steps, never if it is 0, and at the last step in any case."""
    return step == total_steps or (interval > 0 and step % interval == 0)


def micro_batches(
    train_set: PackedDataset, sampler: MicroBatchSampler, num_workers: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets) on the device, each (batch_size, max_seq_len)."""
    on_gpu = device.type == "cuda"
    # A generator of its own: the loader draws nothing from the global one, which drives dropout.
    loader = DataLoader(
        train_set,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=on_gpu,
        generator=torch.Generator(),
    )
    for tokens, targets in loader:
        yield tokens.to(device, non_blocking=on_gpu), targets.to(device, non_blocking=on_gpu)


if __name__ == "__main__":
    main()
    leave()
