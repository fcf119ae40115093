"""Choose the flags that the user did not type, so that the run takes MINUTES: measure and plan."""

import math
import time
from dataclasses import replace
from typing import Any

import psutil

from lm.common.errors import TooLittleMemoryError, UsageError
from lm.common.numbers import counted
from lm.data.shards import CONVERSATIONS
from lm.engine.compilation import obstacle
from lm.launch.candidates import Candidates
from lm.launch.recipe import EVALUATIONS, LEAST_STEPS, Candidate, Plan, Task, choose, plan_for
from lm.training.measurement import Speed
from lm.training.schedule import FROM_WEIGHTS

# Starting the processes, and then writing the results, take about so many times as long as loading
# the packages of preflight: on a slow or busy machine, everything takes longer.
LAUNCH_SHARE = 3.0
# Preparation that takes more than this share of MINUTES does not count: time begins at its end.
MOST_PREPARING = 0.5
# At least this share of MINUTES is for steps and validations, even if the start needs more than the
# rest, as on an overloaded machine: a run that ends late is worth more than one of a single step.
LEAST_TRAINING = 0.25
MOST_PASSES = 10  # over a text, assumed
MOST_PASSES_SEGMENTED = 15  # over a text stored in several segmentations (lm/data/encoding.py)
MOST_PASSES_CHAT = 3  # over conversations
LOG_LINES = 50  # log lines in a run, approximately
# Compiling is tried if it pays off when it saves this share of a step and takes so many times as
# long as loading the packages of preflight. Loading compiled code takes about CACHED_SECONDS.
COMPILING_SAVES, COMPILING_SHARE, CACHED_SECONDS = 0.17, 8.0, 2.0


class TimeBudget:
    """The time of a run, and its plan. Preflight needed `loading` seconds to load its packages, and
    `preparing` seconds to prepare and open the data."""

    def __init__(self, candidates: Candidates, loading: float, preparing: float):
        self.candidates, self.loading = candidates, loading
        self.request, self.typed = candidates.request, candidates.typed
        self.compiles: bool | None = None  # None: the training program decides
        self.started = psutil.Process().create_time()
        if preparing > MOST_PREPARING * 60 * (minutes := self.request.minutes):
            print(f"preparing took {preparing / 60:.1f} min: the {minutes:g} min begin now")
            self.started += preparing

    def task(self) -> Task:
        """Describe the data of the run, and the time that is left for steps and validations."""
        inputs, seconds = self.candidates.inputs, 60 * self.request.minutes
        if self.request.machines == 1:
            left = seconds - (time.time() - self.started) - LAUNCH_SHARE * self.loading
            seconds = max(left, LEAST_TRAINING * seconds)
        data, val, most = inputs.train_set, inputs.val_set, inputs.args.eval_samples
        passes = MOST_PASSES_SEGMENTED if data.segmentations > 1 else MOST_PASSES
        return Task(
            seconds=seconds,
            tokens=data.samples_per_epoch * data.tokens_per_sample,
            most_passes=MOST_PASSES_CHAT if data.kind == CONVERSATIONS else passes,
            samples=min(len(val), most or len(val)) if val else 0,
            validates_first=self.request.stage == "sft",
            has_teacher=inputs.teacher is not None,
            processes=self.candidates.processes,
            typed=self.typed,
        )

    def plan(self) -> Plan:
        """Choose the model, the batch and the steps, and print them. Raises TooLittleMemoryError if
        no model fits into memory."""
        task, found = self.task(), self.candidates
        models = found.models()
        plan = choose(task, models, found.speed)
        # Several machines would measure different times, but must choose the same flags.
        if not (task.steps_are_typed or self.request.machines > 1):
            try:
                plan = self.measured_plan(task, models)
                plan = replace(plan, speed=self.compiled(plan))
            except UsageError as error:
                if found.processes == 1 or isinstance(error, TooLittleMemoryError):
                    raise  # the run would fail, too
                print(f"the speed is assumed, because steps cannot be measured: {error}")
        task = self.task()  # measuring took time
        plan = plan_for(task, plan.model, plan.speed)
        print(f"{'recipe':>13}: {self.describe(task, models, plan)}")
        return plan

    def measured_plan(self, task: Task, models: list[Candidate]) -> Plan:
        """Measure the model that suits best by the speeds known so far, until it is one that was
        measured, or the time for measuring is over. A model that fits only if several processes
        divide it is not measured. If memory runs out, the micro-batch is halved; if it runs out
        even with one sequence, this model and larger ones leave the list `models`. Raises
        TooLittleMemoryError if no model is left."""
        found = self.candidates
        while True:
            plan = choose(task, models, found.speed)
            at = [each.name for each in models].index(plan.model.name)
            model = models[at]  # the plan may have fewer rows
            if plan.speed.measured or not model.rows_alone:
                return plan
            try:
                found.measure(model)
            except TooLittleMemoryError:
                rows, alone = model.rows // 2, model.rows_alone // 2
                models[at] = replace(model, rows=rows, rows_alone=alone)
                if not rows or "batch_size" in self.typed:
                    del models[at:]
                if not models:
                    raise
                continue
            if found.measuring_is_over:
                return choose(task, [m for m in models if found.speed(m).measured], found.speed)

    def compiled(self, plan: Plan) -> Speed:
        """Decide whether the run of a plan compiles, and return its speed. A speed that is only
        assumed has nothing to tell: then the training program decides."""
        wanted, seconds = self.candidates.inputs.args.compile, plan.seconds
        if wanted == "off" or self.candidates.strategy.stage == 3 or not plan.speed.measured:
            return plan.speed
        self.compiles = wanted == "on"
        pays = COMPILING_SAVES * seconds > COMPILING_SHARE * self.loading
        if not (self.compiles or pays) or obstacle(self.candidates.device):
            return plan.speed
        try:  # the run reuses this code
            speed = self.candidates.measure(plan.model, compiled=True)
        except UsageError as error:
            print(f"compiled steps cannot be measured: {error}")
            return plan.speed
        self.compiles |= seconds * (1 - speed.step / plan.speed.step) > CACHED_SECONDS
        return speed if self.compiles else plan.speed

    def describe(self, task: Task, models: list[Candidate], plan: Plan) -> str:
        """Describe the plan, and name the model that four times the minutes would train."""
        speed, minutes = plan.tokens / plan.seconds, self.request.minutes
        how = "expected" if plan.speed.measured else "assumed"
        text = f"{plan.model.name}: {counted(plan.steps, 'steps')} at {speed:,.0f} tokens/s "
        text += f"{how}, {plan.passes:,.2f} passes over the data"
        text += "; compiling would not pay" if self.compiles is False else ""
        if task.steps_are_typed:
            return f"{text}; a flag decides the steps, not MINUTES"
        text = f"{minutes:g} min for {text}"
        if plan.passes >= 0.99 * task.most_passes:
            return f"{text}; this is the most that the text allows: more text would help"
        if task.seconds <= LEAST_TRAINING * 60 * minutes:
            text += "; the start took so long that the run will end late"
        if plan.steps < LEAST_STEPS:
            text += "; these are few steps: set more MINUTES"
        if len(models) > 1:
            longer = replace(task, seconds=task.seconds + 180 * minutes)
            longer = choose(longer, models, self.candidates.speed)
            text += f"; {4 * minutes:g} min would train {longer.model.name}"
        return text

    def flags(self) -> dict[str, Any]:
        """Return the flags to add to the typed flags."""
        plan = self.plan()
        every = math.ceil(plan.steps / plan.evaluations)
        save = math.ceil(plan.steps / EVALUATIONS)
        flags = {
            "batch_size": plan.model.rows,
            "accumulation_steps": plan.accumulation,
            "max_steps": None if "epochs" in self.typed else plan.steps,
            "log_interval": max(1, plan.steps // LOG_LINES),
            "eval_interval": every,
            "sample_interval": max(every, save),
            "save_interval": save,
            "eval_samples": plan.samples if plan.samples < self.task().samples else None,
            "threads": plan.speed.threads,
        }
        flags |= self.candidates.flags(plan.model, plan.tokens / plan.steps, plan.passes)
        if self.compiles is not None:
            flags["compile"] = "on" if self.compiles else "off"
        # A typed rate is that of all layers, as without this recipe.
        typed = self.typed.keys() | (FROM_WEIGHTS if "learning_rate" in self.typed else {})
        return {k: v for k, v in flags.items() if k not in typed and v is not None}
