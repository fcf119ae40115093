"""Choose the flags that the user did not type, so that the run takes MINUTES: measure and plan."""

import gc
import importlib
import io
import os
import signal
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

from common.errors import UsageError
from common.numbers import available_cores
from data.shards import CONVERSATIONS
from model import ConfigError, LMConfig
from training import recipe
from training.arguments import TrainingArguments, as_arguments
from training.engine.compilation import obstacle, should_compile
from training.engine.deepspeed_config import file_of
from training.engine.device import available_memory, matrix_precision, peak_flops
from training.engine.estimate import kind_of, largest_batch
from training.interruption import SIGNALS
from training.prepare import Prepared, shapes_of
from training.request import Request
from training.run import Run
from training.start import notebook_process, one_line_failures, set_up

MINUTES = {"cpu": 4, "cuda": 10}  # default of the variable MINUTES, by device
# The launch is assumed to take LAUNCH_SHARE times the seconds of preflight before its first choice
# (without those for preparing the text). Writing the results is assumed to take END_SECONDS.
LAUNCH_SHARE, END_SECONDS = 1.5, 4
GPU_TOKENS = 32768  # tokens per micro-batch; enough to keep a GPU busy
# Assumed FLOP/s of a CPU core, peak FLOP/s of an unknown GPU, share of the peak that a GPU reaches.
CORE_FLOPS, GPU_PEAK, GPU_SHARE = 5e10, 1e14, 0.3
MOST_PASSES = 10  # over a text; with more passes a model only memorises it
MOST_PASSES_SEGMENTED = 15  # over a text stored in several segmentations (data/encoding.py)
MOST_PASSES_CHAT = 3  # over conversations
STUDENT_SHARE = 0.7  # a student has at most this share of the teacher's parameters, if possible
CHAT_BATCH = 16  # about so many conversations per process in a step; fewer in short runs
MEASURED_SECONDS = 1.5  # minimum time to measure; at least two steps
# Measured steps save no checkpoint. They end by time, long before max_steps.
QUIET = {"log_with": "none", "max_steps": 10**9, "save_interval": 0, "save_minutes": 0.0}
QUIET |= {"profile": False, "warmup_steps": None, "accumulation_steps": 1}


def step_seconds(
    kind: type[TrainingArguments], flags: dict, compiled: bool, threads: int | None
) -> float:
    """Run a training program in this process and return its median step time in seconds. The
    steps are real; the run folder is deleted. `threads`: CPU threads; None: `set_up` decides.

    Raises UsageError or ConfigError if the flags cannot work."""
    flags = flags | QUIET | {"compile": "on" if compiled else "off"}
    with (
        notebook_process([kind.program]),
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
    ):
        os.environ["WORLD_SIZE"] = "1"  # the measurement has one process
        args, settings = as_arguments(flags | {"out_dir": folder}, kind)
        with one_line_failures(args, settings):
            run = set_up(args, settings)
            for number in SIGNALS:  # a signal ends the measurement at once
                signal.signal(number, signal.SIG_DFL)
            if threads:
                torch.set_num_threads(threads)
            times = run_steps(run, importlib.import_module(kind.program.removesuffix(".py")).train)
            run.log.close()
            del run
        if torch.distributed.is_initialized():  # DeepSpeed has created a process group
            importlib.import_module("deepspeed.comm").destroy_process_group()
        gc.collect()  # a run has reference cycles, which would keep its weights on the GPU
    return median(times)


def run_steps(run: Run, train: Callable[[Run], None]) -> list[float]:
    """Let a training program's `train` take some steps. Return the seconds of each step except the
    first, which is slower because it compiles and allocates memory."""
    clock: list[float] = []

    def steps() -> Iterator[int]:
        run.model.train()
        for step in count(1):
            yield step
            if run.accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            clock.append(time.perf_counter())
            if clock[-1] - clock[0] > MEASURED_SECONDS and len(clock) > 2:
                return

    run.steps, run.end, run.finish = steps, lambda *_: None, lambda: None
    run.validate, run.write_sample = lambda step: None, lambda step: None  # SFT calls them
    train(run)
    return [after - before for before, after in pairwise(clock)]


def fitting_shapes(typed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the model flags of each shape that is valid with the typed flags. Raises ConfigError
    if no shape is valid."""
    heads = {name: typed[name] for name in ("n_kv_heads", "head_dim") if name in typed}
    found, problem = [], None
    for shape in recipe.SHAPES:
        settings = recipe.shape_settings(*shape, typed)
        try:
            LMConfig(**heads | settings)
        except ConfigError as error:
            problem = problem or error
        else:
            found += [settings] if settings not in found else []
    if not found:
        raise problem
    return found


class Dial:
    """Choose the flags of a run that takes a given time.

    Args:
        prepared: the run with the first valid shape, or with the shape of existing weights.
        deepspeed: DeepSpeed's configuration, if any.
        typed: the flags that the user typed, and the flags that preflight has added.
        preparing: seconds that preparing the text took.
    """

    def __init__(
        self,
        request: Request,
        prepared: Prepared,
        deepspeed: dict | None,
        typed: dict[str, Any],
        processes: int,
        preparing: float = 0,
    ):
        self.request, self.prepared, self.typed = request, prepared, typed
        self.processes, self.preparing = processes, preparing
        self.started = psutil.Process().create_time()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.minutes = request.minutes or MINUTES[self.device.type]
        self.kind = kind_of(deepspeed)
        self.muon = self.kind.takes_muon and typed.get("optimizer") != "adamw"
        self.fixed = prepared.source is not None  # existing weights decide the shape
        self.talks = prepared.args.dataset.kind == CONVERSATIONS
        known = not {"max_steps", "epochs"}.isdisjoint(typed)
        # Several machines would measure different times, but must choose the same flags.
        self.assumes = known or request.machines > 1

    def models(self) -> list[recipe.Candidate]:
        """Return the models to choose from, smallest first."""
        if self.fixed:
            return [self.candidate({})]
        typed, teacher = self.typed, self.prepared.teacher
        if teacher:
            typed = typed | {"max_seq_len": self.prepared.config.max_seq_len}
        models = [self.candidate(shape) for shape in fitting_shapes(typed)]
        if teacher:
            most = STUDENT_SHARE * teacher.shapes.num_parameters(active=True)
            models = [model for model in models if model.parameters <= most] or models[:1]
        return models

    def candidate(self, settings: dict[str, Any]) -> recipe.Candidate:
        """Return the model of a shape ({}: of `prepared`). Its micro-batch fits the device."""
        data, args = self.prepared.train_set, self.prepared.args
        config = self.prepared.config
        if settings:
            derived = ("head_dim", "hidden_dim", "moe_hidden_dim")
            config = replace(config, **{x: self.typed.get(x) for x in derived} | settings)
        shapes = shapes_of(config, args)
        length = config.max_seq_len if data.lengths is None else data.tokens_per_sample
        tokens = GPU_TOKENS if self.device.type == "cuda" else recipe.BATCH / self.processes
        rows = CHAT_BATCH if self.talks else max(1, round(tokens / length))
        if self.device.type == "cuda":
            work = replace(self.prepared.workload(1, self.device, False), shapes=shapes)
            gpus = range(min(self.processes, torch.cuda.device_count()))
            free = min(available_memory(torch.device("cuda", i), self.processes) for i in gpus)
            rows = max(1, min(rows, largest_batch(self.kind, work, free)))
            if self.request.machines > 1:  # free memory may differ a little between machines
                rows = 1 << (rows.bit_length() - 1)
        rows = self.typed.get("batch_size", rows)
        settings = settings or {"n_layers": config.n_layers, "dim": config.dim}
        flops, parameters = shapes.flops_per_token(length), shapes.num_parameters(active=True)
        teacher = self.prepared.teacher
        if teacher:  # a step includes its forward pass
            flops += teacher.shapes.flops_per_token(length) / 3
        return recipe.Candidate(settings, parameters, flops, length, rows, student=bool(teacher))

    def seconds(self, compiled: bool, model: recipe.Candidate) -> float:
        """Measure the seconds of a step with one micro-batch; assume them if `assumes` is True. It
        becomes True if a step fails, as with a DeepSpeed file that is for several processes."""
        if self.assumes:
            return self.assumed_seconds(model)
        args, source = self.prepared.args, self.prepared.source
        flags = self.model_flags(model) | self.typed
        flags |= {"data": args.data, "batch_size": model.rows, "resume": None}
        flags |= {"teacher": args.teacher} if args.teacher else {}
        flags |= {"init_from": str(source.path)} if source else {}
        if self.request.stage == "sft":
            flags["conversations"] = "builtin"  # beside --data, other values are refused
        if (file := file_of(args)) != "none":
            flags["deepspeed"] = file
        threads = None
        if self.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, available_cores() // self.processes)
        try:
            return step_seconds(self.request.kind, flags, compiled, threads)
        except UsageError as error:
            print(f"the speed is assumed, because steps cannot be measured: {error}")
            self.assumes = True
            return self.assumed_seconds(model)

    def assumed_seconds(self, model: recipe.Candidate) -> float:
        """Return the seconds of a step with one micro-batch at an assumed number of FLOP/s."""
        flops = CORE_FLOPS * available_cores() * self.request.machines / self.processes
        if self.device.type == "cuda":
            precision = matrix_precision(self.prepared.args.mixed_precision)
            peak = peak_flops(torch.cuda.get_device_name(), precision)
            flops = (peak or GPU_PEAK) * GPU_SHARE
        return model.rows * model.length * model.flops / flops

    def task(self, seconds: float) -> recipe.Task:
        """Describe the data of a run with `seconds` for steps and validations."""
        args, data, val = self.prepared.args, self.prepared.train_set, self.prepared.val_set
        most = MOST_PASSES_SEGMENTED if data.segmentations > 1 else MOST_PASSES
        samples = min(len(val), args.eval_samples or len(val)) if val else 0
        return recipe.Task(
            seconds=seconds,
            tokens=data.samples_per_epoch * data.tokens_per_sample,
            most_passes=MOST_PASSES_CHAT if self.talks else most,
            validation_tokens=samples * data.tokens_per_sample,
            sequences=CHAT_BATCH * self.processes if self.talks else None,
            processes=self.processes,
            typed=self.typed,
        )

    def plan(self) -> recipe.Plan:
        """Choose the model, the batch and the steps, and print them."""
        models = self.models()

        def left() -> float:  # seconds left for steps and validations
            if self.request.machines > 1:
                return 60 * self.minutes
            launch = LAUNCH_SHARE * (begun - self.started - self.preparing)
            return 60 * self.minutes - (time.time() - self.started) - launch - END_SECONDS

        begun = time.time()
        task = self.task(left())
        assumed = recipe.choose(task, models, self.assumed_seconds)
        first = next(i for i, m in enumerate(models) if m.settings == assumed.model.settings)
        plan = recipe.choose(task, models, partial(self.seconds, False), first)
        if not self.assumes:
            seconds = plan.step_seconds / plan.accumulation
            flops = plan.tokens / self.processes * plan.model.flops
            compiles = should_compile(self.prepared.args.compile, flops, self.device)
            if compiles and self.kind.stage != 3 and obstacle(self.device) is None:
                seconds = self.seconds(True, plan.model)  # the run reuses this compiled code
            plan = recipe.plan_for(replace(task, seconds=left()), plan.model, seconds)
        print(f"{'recipe':>13}: {self.describe(task, models, plan)}")
        return plan

    def describe(self, task: recipe.Task, models: list, plan: recipe.Plan) -> str:
        """Describe the plan, and name the model that four times the minutes would train."""
        how = "assumed" if self.assumes else "expected"
        speed = plan.tokens / plan.steps / plan.step_seconds
        text = f"{plan.model.name}: {plan.steps:,} steps at {speed:,.0f} tokens/s "
        text += f"{how}, {plan.passes:.2g} passes over the data"
        if not {"max_steps", "epochs"}.isdisjoint(self.typed):
            return text
        text = f"{self.minutes:g} min for {text}"
        if plan.passes >= 0.99 * task.most_passes:
            return f"{text}; more passes would only memorise the data: more text would help"
        if plan.steps < recipe.LEAST_STEPS:
            text += "; these are few steps: set more MINUTES"
        if len(models) > 1:
            ratio = plan.step_seconds / plan.accumulation / self.assumed_seconds(plan.model)
            longer = replace(task, seconds=task.seconds + 180 * self.minutes)
            scaled = lambda model: ratio * self.assumed_seconds(model)  # noqa: E731
            longer = recipe.choose(longer, models, scaled)
            text += f"; {4 * self.minutes:g} min would train {longer.model.name}"
        return text

    def model_flags(self, model: recipe.Candidate) -> dict[str, Any]:
        """Return the flags that depend on the model and on the kind of optimizer."""
        if self.fixed:
            return {"learning_rate": recipe.fine_tuning_rate(model.settings["dim"])}
        return model.settings | recipe.optimizer_flags(model, self.muon)

    def flags(self) -> dict[str, Any]:
        """Return the flags to add to the typed flags."""
        plan = self.plan()
        flags = recipe.run_flags(plan) | self.model_flags(plan.model)
        if not self.fixed:
            flags |= recipe.repetition_flags(plan.passes, self.muon)
        if "epochs" in self.typed:
            del flags["max_steps"]
        return {name: value for name, value in flags.items() if name not in self.typed}
