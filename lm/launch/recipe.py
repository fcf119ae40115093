"""Compute the model, the batch and the steps of run_accelerate.sh for a text, machine and time.

`choose` measures nothing: it gets a function that returns the `Speed` of a model.
docs/recipe.md has the measurements behind the numbers; benchmarks.variants compares shapes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lm.common.errors import TooLittleMemoryError
from lm.common.numbers import counted
from lm.training.schedule import BATCH
from model import LMConfig

# The shapes to choose from, in order of increasing size: n_layers, dim.
SHAPES = (
    *((2, 64), (2, 96), (3, 96), (3, 128), (3, 192), (4, 192), (4, 256), (6, 256)),
    *((6, 384), (8, 512), (10, 640), (12, 768), (16, 1024), (24, 1280), (28, 1536), (32, 2048)),
)
# A run of up to 7 million tokens suits a model with one parameter per 3.9 tokens. In a longer run
# the ratio grows as tokens ** RISE, up to 20 (Hoffmann et al., https://arxiv.org/abs/2203.15556).
TOKENS, TOKENS_PER_PARAMETER, RISE, MOST_PER_PARAMETER = 7e6, 3.9, 0.286, 20
COUNTED_PIECES = 4096  # of the output layer
WITH_TEACHER = 2  # a student's token counts as so many when the shape is chosen
# A batch of BATCH tokens suits a run of up to 5 million tokens. In a longer run it doubles when the
# tokens grow fourfold. It is smaller if the run would have fewer than LEAST_STEPS steps, unless a
# smaller batch is so slow that the run would train fewer than NEARLY times as many tokens.
BATCH_UNTIL, BATCH_RISE, LEAST_STEPS, NEARLY = 5e6, 0.5, 200, 0.9
# A run validates EVALUATIONS times. All validations together take at most VALIDATION_SHARE of the
# time: they read fewer sequences, and if these would be fewer than LEAST_SAMPLES, there are fewer.
EVALUATIONS, VALIDATION_SHARE, LEAST_SAMPLES = 4, 0.1, 64
ROPE_THETA = 1e4  # as in Llama 1 and 2, for contexts up to 4,096 tokens


@dataclass(frozen=True)
class Task:
    """The data of a run, and its time."""

    seconds: float  # for training steps and validations
    tokens: float  # training tokens of one pass over the text
    most_passes: float  # over the text
    samples: int = 0  # sequences of a validation, if time allows
    validates_first: bool = False  # also before the first step, as fine-tuning does
    processes: int = 1
    typed: dict[str, Any] = field(default_factory=dict)  # flags that the user typed


@dataclass(frozen=True)
class Candidate:
    """A model that a run may train."""

    settings: dict[str, Any]  # flags of the model
    parameters: int  # that the rule for the shape counts
    flops: float  # FLOPs per token, including the teacher's forward pass
    length: float  # mean tokens per sequence
    rows: int  # sequences per process in one micro-batch; 0: the model does not fit into memory
    rows_alone: int = 0  # at most so many if this process trains alone
    student: bool = False  # learns from a teacher
    uncounted: int = 0  # other parameters

    @property
    def name(self) -> str:
        """The shape in words, with the number of parameters."""
        shape = f"{counted(self.settings['n_layers'], 'layers')} of dim {self.settings['dim']}"
        return f"{shape} ({(self.parameters + self.uncounted) / 1e6:,.2f} million parameters)"


class Speed(NamedTuple):
    """The seconds that one process needs for a model."""

    micro_batch: float  # forward and backward pass, and a step of the optimizer
    sample: float  # one sequence of the validation split


@dataclass(frozen=True)
class Plan:
    """A model, and its batch, steps and validations."""

    model: Candidate
    step_seconds: float
    accumulation: int
    steps: int
    tokens: float  # training tokens of the whole run
    passes: float  # over the text
    evaluations: int  # validations after the first step
    samples: int  # sequences of one validation

    @property
    def excess(self) -> float:
        """Tokens per parameter divided by the suitable number; above 1 the model is too small.
        Repeated tokens count in full, for the reason in docs/recipe.md."""
        return excess(
            self.tokens * (WITH_TEACHER if self.model.student else 1), self.model.parameters
        )


def excess(tokens: float, parameters: float) -> float:
    """Return tokens per parameter, divided by the number that suits a run of so many tokens."""
    suitable = TOKENS_PER_PARAMETER * max(1, tokens / TOKENS) ** RISE
    return tokens / parameters / min(suitable, MOST_PER_PARAMETER)


def uncounted_parameters(config: LMConfig) -> int:
    """Return how many parameters the rule for the shape does not count: those of an input embedding
    of its own, and of pieces beyond COUNTED_PIECES, which are rare."""
    pieces = max(0, config.vocab_size - COUNTED_PIECES)
    return config.dim * (pieces if config.tie_embeddings else pieces + config.vocab_size)


def shape_settings(n_layers: int, dim: int, typed: dict[str, Any]) -> dict[str, Any]:
    """Return the model flags of a shape. Typed flags override them."""
    dim, kv_heads = typed.get("dim", dim), typed.get("n_kv_heads", 1)
    most = max(2, kv_heads, dim // 64)  # dim / 64 heads, at least 2
    counts = (n for n in range(most, 0, -1) if dim % (2 * n) == 0 and n % kv_heads == 0)
    heads = typed.get("n_heads") or next(counts, most)
    length = 256 if dim < 384 else 512 if dim < 640 else 1024
    settings = {"n_layers": n_layers, "dim": dim, "n_heads": heads, "max_seq_len": length}
    settings |= {"n_kv_heads": heads if heads % 2 else 2, "rope_theta": ROPE_THETA}
    settings |= {"tie_embeddings": False}
    return {k: typed.get(k, v) for k, v in settings.items()}


def choose(
    task: Task, models: list[Candidate], speed: Callable[[Candidate], Speed], first: int = 0
) -> Plan:
    """Return the plan whose tokens per parameter suit the run best, among models of rising size.
    The search goes from models[first] to larger or smaller models until two neighbours enclose the
    best size, or to the end. A model for which `speed` raises TooLittleMemoryError even with one
    sequence, and all larger ones, are left out; if this is true of the smallest, the error is
    raised."""
    plans: dict[int, Plan] = {}
    index, end = first, len(models)
    while 0 <= index < end and index not in plans:
        try:
            plans[index] = plan = with_enough_memory(task, models[index], speed)
        except TooLittleMemoryError:
            if index == 0:
                raise
            end, index = index, index - 1
        else:
            index += 1 if plan.excess > 1 else -1
    return min(plans.values(), key=lambda plan: abs(math.log(plan.excess)))


def with_enough_memory(task: Task, model: Candidate, speed: Callable[[Candidate], Speed]) -> Plan:
    """Return the plan for a model, with half the rows as long as memory runs out."""
    while True:
        try:
            return with_enough_steps(task, model, speed)
        except TooLittleMemoryError:
            if model.rows == 1 or "batch_size" in task.typed:
                raise
            model = replace(model, rows=model.rows // 2, rows_alone=model.rows_alone // 2)


def with_enough_steps(task: Task, model: Candidate, speed: Callable[[Candidate], Speed]) -> Plan:
    """Return the plan for a model. If the run would have fewer than LEAST_STEPS steps of one
    micro-batch, its micro-batches become smaller, as long as this gives more steps."""
    plan = plan_for(task, model, speed(model))
    plans, fixed = [plan], {"batch_size", "max_steps", "epochs"} & task.typed.keys()
    accumulation = task.typed.get("accumulation_steps", 1)
    while plan.steps < LEAST_STEPS and plan.model.rows > 1 and not fixed:
        if plan.accumulation > accumulation:
            break  # more steps need less accumulation, not smaller micro-batches
        fewer = replace(plan.model, rows=max(1, plan.model.rows * plan.steps // LEAST_STEPS))
        plan = plan_for(task, fewer, speed(fewer))
        if plan.steps <= plans[-1].steps:
            break
        plans.append(plan)
    most = max(plan.tokens for plan in plans)
    return next(plan for plan in reversed(plans) if plan.tokens >= NEARLY * most)


def plan_for(task: Task, model: Candidate, speed: Speed) -> Plan:
    """Return the plan for a model of this speed, with at least one step."""
    typed, together = task.typed, model.rows * model.length * task.processes  # tokens
    sample_seconds = speed.sample / task.processes
    evaluations, samples = validations(task, sample_seconds)
    left = task.seconds - (evaluations + task.validates_first) * samples * sample_seconds
    affordable = max(0, left) / speed.micro_batch * together  # tokens
    wanted = max(together, min(affordable, task.most_passes * task.tokens))
    batch = min(BATCH * max(1, wanted / BATCH_UNTIL) ** BATCH_RISE, wanted / LEAST_STEPS)
    accumulation = typed.get("accumulation_steps", max(1, round(batch / together)))
    if "max_steps" in typed:
        steps = typed["max_steps"]
    elif "epochs" in typed:
        steps = math.ceil(typed["epochs"] * task.tokens / together / accumulation)
    else:
        steps = max(1, int(wanted / together / accumulation))
    tokens = steps * accumulation * together
    return Plan(
        model=model,
        step_seconds=speed.micro_batch * accumulation,
        accumulation=accumulation,
        steps=steps,
        tokens=tokens,
        passes=tokens / task.tokens,
        evaluations=evaluations,
        samples=samples,
    )


def validations(task: Task, sample_seconds: float) -> tuple[int, int]:
    """Return the number of validations after the first step, and the sequences of each, for which
    VALIDATION_SHARE of the time suffices. Where flags decide the steps, the time does not."""
    if not task.samples or {"max_steps", "epochs"} & task.typed.keys():
        return EVALUATIONS, task.samples
    typed, first = "eval_samples" in task.typed, int(task.validates_first)
    least = task.samples if typed else min(task.samples, LEAST_SAMPLES)
    affordable = int(VALIDATION_SHARE * max(0, task.seconds) / max(sample_seconds, 1e-9))
    evaluations = max(1, min(EVALUATIONS, affordable // least - first))
    most = task.samples if typed else affordable // (evaluations + first)
    return evaluations, max(1, min(task.samples, most))
