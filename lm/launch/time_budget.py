"""Choose the flags that the user did not type, so that the run takes MINUTES: measure and plan."""

import math
import time
from dataclasses import replace
from typing import Any

import psutil
import torch

from lm.common.errors import TooLittleMemoryError, UsageError
from lm.common.numbers import counted
from lm.data.shards import CONVERSATIONS
from lm.engine.compilation import obstacle
from lm.engine.deepspeed_config import file_of
from lm.engine.strategy import strategy_of
from lm.launch import recipe
from lm.launch.optimizer_flags import (
    SAMPLED_SHARE,
    loss_flags,
    optimizer_flags,
    repetition_flags,
    token_noise,
)
from lm.launch.shell_variables import ShellVariables
from lm.launch.speed import SpeedMeter
from lm.training.inputs import Inputs, shapes_of
from lm.training.schedule import FROM_WEIGHTS, fine_tuning_rate
from model import ConfigError, LMConfig

# Starting the processes, and then writing the results, take about so many times as long as loading
# the packages of preflight: on a slow or busy machine, everything takes longer.
LAUNCH_SHARE = 3.0
# Preparation that takes more than this share of MINUTES does not count: time begins at its end.
MOST_PREPARING = 0.5
MEASURING_SHARE, MOST_MEASURING = 0.2, 60  # share of the time for measuring; at most so many s
GPU_TOKENS = 32768  # tokens per micro-batch; enough to keep a GPU busy
MOST_PASSES = 10  # over a text, assumed
MOST_PASSES_SEGMENTED = 15  # over a text stored in several segmentations (lm/data/encoding.py)
MOST_PASSES_CHAT = 3  # over conversations
STUDENT_SHARE = 0.7  # a student has at most this share of the teacher's parameters, if possible
LOG_LINES = 50  # log lines in a run, approximately
# Compiling is tried if it pays off when it saves this share of a step and takes so many times as
# long as loading the packages of preflight. Loading compiled code takes about CACHED_SECONDS.
COMPILING_SAVES, COMPILING_SHARE, CACHED_SECONDS = 0.17, 4.0, 2.0


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


class TimeBudget:
    """Choose the flags of a run that takes a given time.

    Args:
        inputs: the run with the first valid shape, or with the shape of existing weights.
        deepspeed: DeepSpeed's configuration, if any.
        typed: the flags that the user typed, and the flags that preflight has added.
        loading: seconds that preflight needed to load its packages.
    """

    def __init__(
        self,
        request: ShellVariables,
        inputs: Inputs,
        deepspeed: dict | None,
        typed: dict[str, Any],
        processes: int,
        loading: float,
    ):
        self.request, self.inputs, self.typed = request, inputs, typed
        self.processes, self.loading = processes, loading
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.minutes, self.strategy = request.minutes, strategy_of(deepspeed)
        measuring = min(MEASURING_SHARE * 60 * self.minutes, MOST_MEASURING)
        self.meter = SpeedMeter(
            request, inputs, self.strategy, processes, measuring, "threads" in typed
        )
        self.muon = self.strategy.takes_muon and typed.get("optimizer") != "adamw"
        self.fixed = inputs.source is not None  # existing weights decide the shape
        self.knows_steps = not {"max_steps", "epochs"}.isdisjoint(typed)
        self.compiles: bool | None = None  # None: the training program decides
        self.started = psutil.Process().create_time()
        # Preparation runs in another process, so it takes no CPU time of this one.
        waited = time.time() - self.started - max(loading, time.process_time())
        if waited > MOST_PREPARING * 60 * self.minutes:
            print(f"preparing took {waited / 60:.1f} min: the {self.minutes:g} min begin now")
            self.started += waited

    def models(self) -> list[recipe.Candidate]:
        """Return the models to choose from, smallest first. A model that does not fit into memory
        is left out; if none fits, the smallest is returned with a micro-batch of one sequence."""
        shapes = [{}]  # the shape of existing weights
        typed, teacher = self.typed, self.inputs.teacher
        if not self.fixed:
            if self.inputs.train_set.segmentations > 1:  # a small text, read many times
                typed = {"tie_embeddings": True} | typed
            if teacher:
                typed = typed | {"max_seq_len": self.inputs.config.max_seq_len}
            shapes = fitting_shapes(typed)
        models = [self.candidate(shape) for shape in shapes]
        if teacher and not self.fixed:
            most = STUDENT_SHARE * teacher.shapes.num_parameters(active=True)
            small = [m for m in models if m.parameters + m.uncounted <= most]
            models = small or models[:1]
        fitting = [model for model in models if model.rows]
        return fitting or [replace(models[0], rows=self.typed.get("batch_size", 1))]

    def candidate(self, settings: dict[str, Any]) -> recipe.Candidate:
        """Return the model of a shape ({}: of `inputs`). Its micro-batch fits the device, or is
        empty if the model does not fit."""
        data, args, config = self.inputs.train_set, self.inputs.args, self.inputs.config
        if settings:
            derived = ("head_dim", "hidden_dim", "moe_hidden_dim")
            config = replace(config, **{x: self.typed.get(x) for x in derived} | settings)
        shapes = shapes_of(config, args)
        length = config.max_seq_len if data.lengths is None else data.tokens_per_sample
        tokens = GPU_TOKENS if self.device.type == "cuda" else recipe.BATCH / self.processes
        rows = max(1, round(tokens / length))
        fitting = self.meter.largest_rows(shapes, self.processes)
        rows = self.typed.get("batch_size", min(rows, fitting))
        rows = rows if rows <= fitting else 0
        if self.request.machines > 1 and "batch_size" not in self.typed:
            rows = rows and 1 << (rows.bit_length() - 1)  # free memory may differ a little
        rows_alone = self.meter.largest_rows(shapes, 1) if self.processes > 1 else rows
        settings = settings or {"n_layers": config.n_layers, "dim": config.dim}
        flops, parameters = shapes.flops_per_token(length), shapes.num_parameters(active=True)
        uncounted = recipe.uncounted_parameters(config)
        teacher = self.inputs.teacher
        if teacher:  # a step includes its forward pass
            flops += teacher.shapes.flops_per_token(length) / 3
        model = recipe.Candidate(
            settings=settings,
            parameters=parameters - uncounted,
            flops=flops,
            length=length,
            rows=rows,
            rows_alone=rows_alone,
            student=bool(teacher),
            uncounted=uncounted,
        )
        if (self.loss_flags(model) | self.typed).get("sampled_softmax", 1) > 1:
            output = 6 * config.dim * config.vocab_size
            model = replace(model, flops=flops - (1 - SAMPLED_SHARE) * output)
        return model

    def left(self) -> float:
        """Return the seconds that are left for steps and validations."""
        if self.request.machines > 1:
            return 60 * self.minutes
        return 60 * self.minutes - (time.time() - self.started) - LAUNCH_SHARE * self.loading

    def task(self) -> recipe.Task:
        """Describe the data of the run and its time."""
        args, data, val = self.inputs.args, self.inputs.train_set, self.inputs.val_set
        most = MOST_PASSES_SEGMENTED if data.segmentations > 1 else MOST_PASSES
        most = MOST_PASSES_CHAT if data.kind == CONVERSATIONS else most
        return recipe.Task(
            seconds=self.left(),
            tokens=data.samples_per_epoch * data.tokens_per_sample,
            most_passes=most,
            samples=min(len(val), args.eval_samples or len(val)) if val else 0,
            validates_first=self.request.stage == "sft",
            processes=self.processes,
            typed=self.typed,
        )

    def plan(self) -> recipe.Plan:
        """Choose the model, the batch and the steps, and print them. Raises TooLittleMemoryError if
        no model fits into memory."""
        task, models = self.task(), self.models()
        plan, how = recipe.choose(task, models, self.meter.assumed), "assumed"
        # Several machines would measure different times, but must choose the same flags.
        if not (self.knows_steps or self.request.machines > 1):
            first = next(i for i, m in enumerate(models) if m.settings == plan.model.settings)
            try:
                plan, how = recipe.choose(task, models, self.speed, first), "expected"
                plan = self.compiled_plan(task, plan)
            except TooLittleMemoryError:
                raise
            except UsageError as error:
                print(f"the speed is assumed, because steps cannot be measured: {error}")
        print(f"{'recipe':>13}: {self.describe(task, models, plan, how)}")
        return plan

    def speed(self, model: recipe.Candidate) -> recipe.Speed:
        """Measure the speed of a model that is not compiled."""
        return self.meter.measured(model, self.run_flags(model))

    def compiled_plan(self, task: recipe.Task, plan: recipe.Plan) -> recipe.Plan:
        """Decide whether the run compiles; return the plan for the time that is then left."""
        speed, wanted = self.speed(plan.model), self.inputs.args.compile
        taken = plan.steps * plan.step_seconds
        if wanted != "off" and self.strategy.stage != 3:
            self.compiles = wanted == "on"
            pays = COMPILING_SAVES * taken > COMPILING_SHARE * self.loading
            if (self.compiles or pays) and obstacle(self.device) is None:
                threads = (self.meter.threads,) if self.meter.threads else ()
                try:  # the run reuses this code
                    compiled = self.meter.measure(
                        plan.model, self.run_flags(plan.model), threads, compiled=True
                    )
                except UsageError as error:
                    print(f"compiled steps cannot be measured: {error}")
                    compiled = speed
                saved = taken * (1 - compiled.micro_batch / speed.micro_batch)
                self.compiles |= saved > CACHED_SECONDS
                speed = compiled if self.compiles else speed
        return recipe.plan_for(replace(task, seconds=self.left()), plan.model, speed)

    def run_flags(self, model: recipe.Candidate) -> dict[str, Any]:
        """Return the flags of a run that trains the model."""
        args, source = self.inputs.args, self.inputs.source
        flags = self.model_flags(model) | self.typed | {"data": args.data, "resume": None}
        flags |= {"teacher": args.teacher} if args.teacher else {}
        flags |= {"init_from": str(source.path)} if source else {}
        if self.request.stage == "sft":
            flags["conversations"] = "builtin"  # beside --data, other values are refused
        if (file := file_of(args.deepspeed)) != "none":
            flags["deepspeed"] = file
        return flags

    def describe(self, task: recipe.Task, models: list, plan: recipe.Plan, how: str) -> str:
        """Describe the plan, and name the model that four times the minutes would train."""
        speed = plan.tokens / plan.steps / plan.step_seconds
        text = f"{plan.model.name}: {counted(plan.steps, 'steps')} at {speed:,.0f} tokens/s "
        text += f"{how}, {plan.passes:.2g} passes over the data"
        text += "; compiling would not pay" if self.compiles is False else ""
        if self.knows_steps:
            return text
        text = f"{self.minutes:g} min for {text}"
        if plan.passes >= 0.99 * task.most_passes:
            return f"{text}; this is the most that the text allows: more text would help"
        if plan.steps < recipe.LEAST_STEPS:
            text += "; these are few steps: set more MINUTES"
        if len(models) > 1:
            longer = replace(task, seconds=task.seconds + 180 * self.minutes)
            longer = recipe.choose(longer, models, self.meter.assumed)
            text += f"; {4 * self.minutes:g} min would train {longer.model.name}"
        return text

    def model_flags(self, model: recipe.Candidate, batch: float = recipe.BATCH) -> dict:
        """Return the flags that depend on the model, the kind of optimizer, and the number of
        tokens in a step."""
        if self.fixed:
            return {"learning_rate": fine_tuning_rate(model.settings["dim"])}
        return model.settings | self.loss_flags(model) | optimizer_flags(model, self.muon, batch)

    def loss_flags(self, model: recipe.Candidate) -> dict:
        """Return the flags of the loss. A student compares the teacher's whole vocabulary."""
        whole = self.fixed or self.inputs.teacher
        pieces = 0 if whole else self.inputs.config.vocab_size
        return loss_flags(model, pieces, self.device.type == "cuda")

    def flags(self) -> dict[str, Any]:
        """Return the flags to add to the typed flags."""
        plan = self.plan()
        every = math.ceil(plan.steps / plan.evaluations)
        flags = {
            "batch_size": plan.model.rows,
            "accumulation_steps": plan.accumulation,
            "max_steps": plan.steps,
            "log_interval": max(1, plan.steps // LOG_LINES),
            "eval_interval": every,
            "sample_interval": every,
            "save_interval": math.ceil(plan.steps / recipe.EVALUATIONS),
        }
        if plan.samples < self.task().samples:
            flags["eval_samples"] = plan.samples
        if self.meter.threads:
            flags["threads"] = self.meter.threads
        flags |= self.model_flags(plan.model, plan.tokens / plan.steps)
        if not self.fixed:
            flags |= repetition_flags(plan.passes, self.muon)
            # Data of older versions mix the segmentations; students were not measured.
            if self.inputs.train_set.n_first and not self.inputs.teacher:
                flags["token_noise"] = token_noise(plan.passes)
        if self.compiles is not None:
            flags["compile"] = "on" if self.compiles else "off"
        if "epochs" in self.typed:
            del flags["max_steps"]
        # A typed rate is that of all layers, as without this recipe.
        typed = self.typed.keys() | (FROM_WEIGHTS if "learning_rate" in self.typed else {})
        return {name: value for name, value in flags.items() if name not in typed}
