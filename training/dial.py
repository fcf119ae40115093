"""Choose the flags that the user has not typed, for a time: measure steps, and apply the recipe."""

import importlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from statistics import median
from typing import Any

import psutil
import torch

from common.numbers import available_cores
from data.shards import CONVERSATIONS
from model import LMConfig
from training import recipe
from training.arguments import TrainingArguments, as_arguments
from training.engine.compilation import obstacle, should_compile
from training.engine.deepspeed_config import file_of
from training.engine.device import available_memory, peak_flops
from training.engine.estimate import kind_of, largest_batch
from training.prepare import Prepared, shapes_of
from training.request import Request
from training.run import Run
from training.start import notebook_process, set_up

MINUTES = {"cpu": 4, "cuda": 10}  # the default of MINUTES
# Seconds that a run takes besides steps and validations, as a share of the time until here.
LAUNCH_SHARE, END_SECONDS = 1.5, 4
MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}  # tokens that keep a device busy
# FLOP/s to assume before anything is measured: of a CPU's core, and as a share of a GPU's peak.
CORE_FLOPS, GPU_PEAK, GPU_SHARE = 5e10, 1e14, 0.3
# Passes over the data after which a model only learns it by heart: a text, a text that is stored in
# several segmentations (data/encoding.py), conversations.
MOST_PASSES, MOST_PASSES_SEGMENTED, MOST_PASSES_CHAT = 10, 15, 3
STUDENT_SHARE = 0.7  # largest student, as a share of the teacher's parameters
CHAT_BATCH = 16  # conversations of a process in a step
MEASURED_SECONDS, MOST_STEPS = 1.5, 20  # but at least two steps
# With so many steps, `report` is never due, and --compile auto compiles.
QUIET = {"log_with": "none", "max_steps": 10**9, "save_interval": 0, "save_minutes": 0.0}


def step_seconds(
    kind: type[TrainingArguments], flags: dict, compiled: bool, threads: int | None
) -> float:
    """Return the median time in seconds of the steps of a training program with these flags, in
    this process. The steps are real, but leave nothing behind.

    Raises UsageError, ConfigError or DataError if the flags cannot work."""
    compile_flag = {"compile": "on" if compiled else "off"}
    program = kind.program.removesuffix(".py")
    with (
        notebook_process([kind.program]),
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
    ):
        os.environ.pop("WORLD_SIZE", None)  # one process, whatever the launch will have
        run = set_up(*as_arguments(flags | QUIET | compile_flag | {"out_dir": folder}, kind))
        if threads:
            torch.set_num_threads(threads)
        times = run_steps(run, importlib.import_module(program).train)
        run.log.close()
    return median(times)


def run_steps(run: Run, train: Callable[[Run], None]) -> list[float]:
    """Let a training program's `train` take some steps; return their seconds, without those of the
    first step, which compiles and takes memory."""
    clock: list[float] = []

    def steps() -> Iterator[int]:
        run.model.train()
        for step in count(1):
            yield step
            if run.accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            clock.append(time.perf_counter())
            enough = clock[-1] - clock[0] > MEASURED_SECONDS and len(clock) > 2
            if enough or len(clock) > MOST_STEPS:
                return

    run.steps, run.end, run.finish = steps, lambda *_: None, lambda: None
    run.validate, run.write_sample = lambda step: None, lambda step: None  # fine-tuning begins so
    train(run)
    return [after - before for before, after in pairwise(clock)]


class Dial:
    """Choose the flags of a run for a time.

    Args:
        prepared: the run with the smallest shape, unless existing weights decide the shape.
        deepspeed: DeepSpeed's configuration, if any.
        typed: the flags that the user typed, and those that name the data.
    """

    def __init__(
        self,
        request: Request,
        prepared: Prepared,
        deepspeed: dict | None,
        typed: dict[str, Any],
        processes: int,
    ):
        self.request, self.prepared, self.typed = request, prepared, typed
        self.processes = processes
        self.started = psutil.Process().create_time()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.minutes = request.minutes or MINUTES[self.device.type]
        self.kind = kind_of(deepspeed, prepared.config.dim)
        self.muon = self.kind.takes_muon and typed.get("optimizer") != "adamw"
        self.fixed = prepared.source is not None  # existing weights decide the shape

    def models(self) -> list[recipe.Candidate]:
        """Return the models to choose from, in the order of their size."""
        if self.fixed:
            return [self.candidate({})]
        shapes = recipe.SHAPES
        if self.prepared.teacher:
            shapes = recipe.SMALL_SHAPES + shapes
        settings = [recipe.shape_settings(*shape, self.typed) for shape in shapes]
        if self.prepared.teacher:
            length = self.prepared.config.max_seq_len
            settings = [each | {"max_seq_len": length} for each in settings]
        unique = [each for i, each in enumerate(settings) if each not in settings[:i]]
        found = sorted(map(self.candidate, unique), key=lambda model: model.parameters)
        if teacher := self.prepared.teacher:
            most = STUDENT_SHARE * teacher.shapes.num_parameters()
            found = [model for model in found if model.parameters <= most] or found[:1]
        return found

    def candidate(self, settings: dict[str, int]) -> recipe.Candidate:
        """Return a model with the largest micro-batch that fits and keeps the device busy."""
        config = self.config(settings)
        shapes = shapes_of(config, self.prepared.args)
        length = min(self.prepared.train_set.tokens_per_sample, config.max_seq_len)
        if not self.fixed:
            length = config.max_seq_len
        rows = max(1, round(MICRO_BATCH_TOKENS[self.device.type] / length))
        if self.request.stage == "sft":
            rows = CHAT_BATCH
        if self.device.type == "cuda":
            work = replace(self.prepared.workload(self.processes, self.device, True), shapes=shapes)
            gpus = range(min(self.processes, torch.cuda.device_count()))
            room = min(available_memory(torch.device("cuda", i), self.processes) for i in gpus)
            rows = max(1, min(rows, largest_batch(self.kind, work, room)))
        rows = self.typed.get("batch_size", rows)
        settings = settings or {"n_layers": config.n_layers, "dim": config.dim}
        flops = shapes.flops_per_token(length)
        return recipe.Candidate(settings, shapes.num_parameters(), flops, length, rows)

    def config(self, settings: dict[str, int]) -> LMConfig:
        """Return the prepared configuration with other sizes, and derived sizes anew."""
        if self.fixed:
            return self.prepared.config
        derived = {name: self.typed.get(name) for name in ("head_dim", "hidden_dim")}
        return replace(self.prepared.config, **derived | settings)

    def seconds(self, compiled: bool, model: recipe.Candidate) -> float:
        """Measure a step of a model with one micro-batch. Machines would measure different times,
        and must choose the same flags: several machines assume a speed."""
        if self.request.machines > 1:
            return self.assumed_seconds(model)
        args, source = self.prepared.args, self.prepared.source
        flags = self.model_flags(model) | self.typed | {"data": args.data}
        flags |= {"batch_size": model.rows, "accumulation_steps": 1}
        flags |= {"teacher": args.teacher} if args.teacher else {}
        flags |= {"init_from": str(source.path)} if source else {}
        if (file := file_of(args)) != "none":
            flags["deepspeed"] = file
        left_out = ("epochs", "run_name", "resume", "time_limit", "warmup_steps")
        flags = {name: value for name, value in flags.items() if name not in left_out}
        threads = None
        if self.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, available_cores() // self.processes)
        return step_seconds(self.request.kind, flags, compiled, threads)

    def assumed_seconds(self, model: recipe.Candidate) -> float:
        """Return the seconds of a step at the speed that is assumed before anything is measured."""
        flops = CORE_FLOPS * available_cores()
        if self.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(), self.prepared.args.mixed_precision)
            flops = (peak or GPU_PEAK) * GPU_SHARE
        return model.rows * model.length * model.flops / flops

    def task(self, seconds: float) -> recipe.Task:
        """Return the data of the run, with this time for it."""
        args, data, val = self.prepared.args, self.prepared.train_set, self.prepared.val_set
        copies = data.description.get("prepared_from", {}).get("segmentations") or 1
        most = MOST_PASSES_SEGMENTED if copies > 1 else MOST_PASSES
        typed = self.typed
        if args.dataset.kind == CONVERSATIONS:
            most = MOST_PASSES_CHAT
            typed = {"accumulation_steps": 1} | typed  # a batch of CHAT_BATCH conversations
        samples = min(len(val), args.eval_samples or len(val)) if val else 0
        return recipe.Task(
            seconds=seconds,
            tokens=len(data) * data.tokens_per_sample / copies,
            copies=copies,
            most_passes=most,
            validation_tokens=samples * data.tokens_per_sample,
            processes=self.processes,
            typed=typed,
        )

    def plan(self) -> recipe.Plan:
        """Choose the model and the run, and print them."""
        models, left = self.models(), 60 * self.minutes
        begun = time.time()
        if self.request.machines == 1:
            left -= (1 + LAUNCH_SHARE) * (begun - self.started) + END_SECONDS
        task = self.task(left)
        known = {"max_steps", "epochs"} & self.typed.keys() and len(models) == 1
        measure = self.assumed_seconds if known else partial(self.seconds, False)
        assumed = recipe.choose(task, models, self.assumed_seconds)
        first = next(i for i, m in enumerate(models) if m.settings == assumed.model.settings)
        plan = recipe.choose(task, models, measure, first)
        flops = plan.tokens / self.processes * plan.model.flops
        compiles = should_compile(self.prepared.args.compile, flops, self.device)
        if not known and compiles and self.kind.stage != 3 and obstacle(self.device) is None:
            seconds = self.seconds(True, plan.model)  # the run loads this compiled code from disk
            task = replace(task, seconds=left - (time.time() - begun))
            plan = recipe.plan_for(task, plan.model, seconds)
        print(f"{'recipe':>13}: {self.describe(task, models, plan)}")
        return plan

    def describe(self, task: recipe.Task, models: list, plan: recipe.Plan) -> str:
        """Return what was chosen, and what four times the time would choose."""
        text = f"{self.minutes:g} minutes for {plan.model.name}: "
        text += f"{plan.steps:,} steps at {plan.tokens_per_second:,.0f} tokens/s expected, "
        text += f"{plan.passes:.2g} passes over the data"
        if plan.passes >= 0.99 * task.most_passes:
            return f"{text}; more passes would only learn it by heart: more text would help"
        if plan.steps < recipe.LEAST_STEPS:
            text += ", which is little: give it more MINUTES"
        ratio = plan.step_seconds / plan.accumulation / self.assumed_seconds(plan.model)
        scaled = lambda model: ratio * self.assumed_seconds(model)  # noqa: E731
        longer = recipe.choose(replace(task, seconds=4 * 60 * self.minutes), models, scaled)
        if len(models) > 1:
            text += f"; {4 * self.minutes:g} minutes would train {longer.model.name}"
        return text

    def model_flags(self, model: recipe.Candidate) -> dict[str, Any]:
        """Return the flags that depend on the model alone."""
        if self.request.stage == "sft":
            return {"learning_rate": recipe.fine_tuning_rate(model.settings["dim"])}
        shape = {} if self.fixed else model.settings
        return shape | recipe.optimizer_flags(model, self.muon)

    def flags(self) -> dict[str, Any]:
        """Return the flags to add to those that are typed."""
        plan = self.plan()
        flags = recipe.run_flags(plan)
        flags |= self.model_flags(plan.model)
        if self.request.stage != "sft":
            flags["weight_decay"] = recipe.weight_decay(plan.passes)
        if "epochs" in self.typed:
            del flags["max_steps"]
        return {name: value for name, value in flags.items() if name not in self.typed}
