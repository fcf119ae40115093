"""The models that a run may train on this machine: their flags, memory and speed."""

import os
import time
from dataclasses import replace
from typing import Any

import torch

from lm.common.numbers import available_cores, rounded
from lm.engine.deepspeed_config import file_of
from lm.engine.engine import check_precision, deepspeed_plugin, set_launch_variables
from lm.engine.hardware import available_memory, peak_flops, user_sets_threads
from lm.engine.memory import largest_batch
from lm.engine.strategy import strategy_of
from lm.launch import recipe
from lm.launch.recipe import Candidate
from lm.launch.shell_variables import ShellVariables
from lm.training.arguments import as_arguments
from lm.training.inputs import find_inputs, shapes_of
from lm.training.log import require_trackers
from lm.training.measurement import Speed, measure
from lm.training.schedule import fine_tuning_rate, recipe_flags
from model import Transformer

GPU_TOKENS = 32768  # tokens per micro-batch; enough to keep a GPU busy
STUDENT_SHARE = 0.7  # a student has at most this share of the teacher's parameters, if possible
MEASURING_SHARE, MOST_MEASURING = 0.2, 60  # share of the time for measuring; at most so many s
# Assumed FLOP/s of a CPU core, peak FLOP/s of an unknown GPU, share of the peak that a GPU reaches.
CORE_FLOPS, GPU_PEAK, GPU_SHARE = 5e10, 1e14, 0.3
FORWARD_SHARE = 1 / 3  # of the time of a training step; assumed for validation


class Candidates:
    """The models from which a new run chooses, with the data of the run. Their speed is measured,
    or assumed. `typed` are the flags that the user typed, and those that preflight has added.
    Raises UsageError or ConfigError if the run cannot work."""

    def __init__(self, request: ShellVariables, typed: dict[str, Any]):
        self.request, self.typed, self.processes = request, typed, request.processes
        self.fixed = bool(request.stage == "sft" or typed.get("init_from"))  # by existing weights
        shape = {} if self.fixed else recipe.valid_shapes(typed)[0]  # until one is chosen
        if request.stage == "distill":
            shape.pop("max_seq_len", None)  # the teacher decides the length
        args, model_settings = as_arguments(typed | shape, request.arguments)
        require_trackers(args.trackers)
        check_precision(args, torch.cuda.is_available())
        set_launch_variables(args)
        os.environ["WORLD_SIZE"] = str(self.processes)
        has_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        deepspeed = deepspeed_plugin(args).deepspeed_config if has_deepspeed else None
        self.strategy = strategy_of(deepspeed)
        self.inputs = find_inputs(args, model_settings, None, self.processes)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        is_given = self.device.type != "cpu" or "threads" in typed or user_sets_threads()
        cores = max(1, available_cores() // self.processes)
        counts = dict.fromkeys((cores, max(1, cores - 1), max(1, cores // 2)))
        self.thread_counts = () if is_given else tuple(counts)  # of a process, to choose from
        seconds = min(MEASURING_SHARE * 60 * request.minutes, MOST_MEASURING)
        self.until = time.time() + seconds  # measuring ends
        self.seconds = seconds / 2  # of a measurement, at most
        # Models that were measured without compilation, in this order: by name.
        self.known: dict[str, tuple[Candidate, Speed]] = {}
        self.taken = 0.0  # seconds of the last measurement

    def models(self) -> list[Candidate]:
        """Return the models to choose from, smallest first. A model that does not fit into memory
        is left out; if none fits, the smallest is returned with a micro-batch of one sequence."""
        typed, teacher = self.typed, self.inputs.teacher
        if self.inputs.train_set.segmentations > 1:  # a small text, read many times
            typed = {"tie_embeddings": True} | typed
        if teacher:
            typed = typed | {"max_seq_len": self.inputs.config.max_seq_len}
        shapes = [{}] if self.fixed else recipe.valid_shapes(typed)  # {}: of existing weights
        models = [self.candidate(shape) for shape in shapes]
        if teacher:
            most = STUDENT_SHARE * teacher.shapes.num_parameters(active=True)
            models = [model for model in models if model.parameters <= most] or models[:1]
        fitting = [model for model in models if model.rows]
        return fitting or [replace(models[0], rows=self.typed.get("batch_size", 1))]

    def candidate(self, settings: dict[str, Any]) -> Candidate:
        """Return the model of a shape ({}: of `inputs`). Its micro-batch fits the device, or is
        empty if the model does not fit."""
        data, teacher, config = self.inputs.train_set, self.inputs.teacher, self.inputs.config
        if settings:
            derived = ("head_dim", "hidden_dim", "moe_hidden_dim")
            config = replace(config, **{x: self.typed.get(x) for x in derived} | settings)
        shapes = shapes_of(config, self.inputs.args)
        length = config.max_seq_len if data.lengths is None else data.tokens_per_sample
        tokens = GPU_TOKENS if self.device.type == "cuda" else recipe.BATCH / self.processes
        fitting = self.largest_rows(shapes, self.processes)
        rows = self.typed.get("batch_size", min(max(1, round(tokens / length)), fitting))
        rows = rows if rows <= fitting else 0
        if self.request.machines > 1 and "batch_size" not in self.typed:
            rows = rows and 1 << (rows.bit_length() - 1)  # free memory may differ a little
        parameters, flops = shapes.num_parameters(active=True), shapes.flops_per_token(length)
        if teacher:  # a step includes its forward pass
            flops += teacher.shapes.flops_per_token(length) / 3
        model = Candidate(
            settings=settings or {"n_layers": config.n_layers, "dim": config.dim},
            parameters=parameters,
            counted=parameters - recipe.uncounted_parameters(config),
            flops=flops,
            length=length,
            rows=rows,
            rows_alone=self.largest_rows(shapes, 1) if self.processes > 1 else rows,
        )
        if (self.flags(model) | self.typed).get("sampled_softmax", 1) > 1:
            output = 6 * config.dim * config.vocab_size
            model = replace(model, flops=flops - (1 - recipe.SAMPLED_SHARE) * output)
        return model

    def largest_rows(self, shapes: Transformer, processes: int) -> int:
        """Return how many sequences a micro-batch may have, so that each of `processes` has enough
        memory to train a model without compilation; 0 if it cannot train the model."""
        work = replace(self.inputs.workload(processes, self.device, False), shapes=shapes)
        # With accumulation, DDP needs buckets beside the gradients.
        work = replace(work, args=replace(work.args, accumulation_steps=2))
        n_gpus = min(self.processes, torch.cuda.device_count())
        devices = [torch.device("cuda", i) for i in range(n_gpus)] or [self.device]
        free = min(available_memory(device, self.processes) for device in devices)
        return largest_batch(self.strategy, work, free)

    def flags(
        self, model: Candidate, batch: float = recipe.BATCH, passes: float = 1
    ) -> dict[str, Any]:
        """Return the flags of shape, loss and optimizer, for steps of `batch` tokens and so many
        `passes` over the data."""
        if self.fixed:
            return {"learning_rate": fine_tuning_rate(model.settings["dim"])}
        pieces = 0 if self.inputs.teacher else self.inputs.config.vocab_size  # 0: all are compared
        flags = recipe.loss_flags(model, pieces, self.device.type == "cuda")
        # Noise is for text in several segmentations. 0.1 was measured at 15 passes; less for fewer
        # passes is assumed. Data of older versions mix the segmentations.
        if self.inputs.train_set.n_first and not self.inputs.teacher:
            flags["token_noise"] = rounded(min(0.1, passes / 150))
        muon = self.strategy.takes_muon and self.typed.get("optimizer") != "adamw"
        optimizer, shape = "muon" if muon else "adamw", model.settings
        sizes = shape["dim"], shape["tie_embeddings"], model.counted
        return shape | flags | recipe_flags(optimizer, *sizes, batch, passes)

    def speed(self, model: Candidate) -> Speed:
        """Return the measured speed of a model; if there is none, a speed in proportion to that of
        the last model that was measured, or else at an assumed number of FLOP/s."""
        if model.name in self.known:
            return self.known[model.name][1]
        work = model.rows * model.length * model.flops  # FLOPs of a step
        if self.known:
            other, speed = list(self.known.values())[-1]
            scale = work / (other.rows * other.length * other.flops)
            of_one = scale * other.rows / model.rows
            times = speed.step * scale, speed.one * of_one, speed.sample * of_one
            return Speed(*times, speed.threads, measured=False)
        flops = CORE_FLOPS * available_cores() * self.request.machines / self.processes
        if self.device.type == "cuda":
            precision = self.inputs.args.matrix_precision
            peak = peak_flops(torch.cuda.get_device_name(), precision) or GPU_PEAK
            flops = peak * GPU_SHARE
        step, one = work / flops, work / flops / model.rows
        return Speed(step, one, FORWARD_SHARE * one, measured=False)

    def measure(self, model: Candidate, compiled: bool = False) -> Speed:
        """Measure the speed in this process alone, with the fastest number of threads; compiled
        steps have the number that was fastest before. If this process has memory for fewer
        sequences than each process of the run, the time is scaled up. Raises errors as
        lm.training.measurement.measure does."""
        begun, rows = time.time(), min(model.rows, model.rows_alone)
        args, source = self.inputs.args, self.inputs.source  # of the run, with paths filled in
        flags = self.flags(model) | self.typed | {"data": args.data, "resume": None}
        flags |= {"batch_size": rows, "compile": "on" if compiled else "off"}
        flags.pop("conversations", None)  # they are prepared: --data
        if args.teacher:
            flags["teacher"] = args.teacher
        if source:
            flags["init_from"] = str(source.path)
        if (file := file_of(args.deepspeed)) != "none":
            flags["deepspeed"] = file
        counts, seconds = self.thread_counts, self.seconds
        if compiled:  # compiling comes on top of the fifth
            counts, seconds = counts and (self.speed(model).threads,), 4 * seconds
        speed = measure(self.request.train, self.request.arguments, flags, counts, seconds)
        speed = speed.with_rows(model.rows, rows)
        if not compiled:
            self.known[model.name] = model, speed
            self.taken = time.time() - begun
        return speed

    @property
    def measuring_is_over(self) -> bool:
        """True if there is no time for one more measurement. The first model is a guess by an
        assumed speed, so a second one is always measured."""
        return len(self.known) > 1 and time.time() + self.taken > self.until
