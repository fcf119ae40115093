"""The recipe of run_accelerate.sh: the model and the flags that suit a text, a machine and a time.

`choose` measures nothing: it asks a function for the seconds of a step, and is otherwise pure.
docs/recipe.md has the measurements behind the numbers; `python -m benchmarks.recipe` repeats them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

# Shapes of increasing cost: n_layers, dim. In two minutes on two cores no smaller model learned
# more than the first one.
SHAPES = (
    *(
        (3, 96),
        (3, 128),
        (3, 160),
        (4, 192),
        (4, 256),
        (6, 256),
        (6, 384),
        (8, 512),
        (10, 640),
        (12, 768),
    ),
    *((16, 1024), (24, 1280), (28, 1536), (32, 2048)),
)
SMALL_SHAPES = ((2, 64),)  # for students of a small teacher
# A run of 5 million tokens suits a model of 1.25 million parameters: 4 tokens per parameter. In
# longer runs the ratio rises to 20 (Hoffmann et al., https://arxiv.org/abs/2203.15556).
TOKENS, TOKENS_PER_PARAMETER, RISE, MOST_PER_PARAMETER = 5e6, 4, 0.286, 20
# A batch of 4,096 tokens suits a run of 5 million tokens. It doubles when the run grows fourfold.
BATCH, BATCH_RISE, LEAST_STEPS = 4096, 0.5, 200
MIN_STEPS = 20  # the fewest to plan, however short the time; LEAST_STEPS only limits the batch
# The worth of a repeated pass falls to 1/e after 15 passes: https://arxiv.org/abs/2305.16264
WORTH_PASSES = 15.4
EVALUATIONS = 4  # validations in a run
LOG_LINES = 50


@dataclass(frozen=True)
class Task:
    """The data of a run, and the time for it."""

    seconds: float  # for training steps and validations
    tokens: float  # training tokens of one pass over the text
    most_passes: float  # after which a model only learns the text by heart
    copies: int = 1  # segmentations of the text in an epoch, see data/encoding.py
    validation_tokens: float = 0  # in one validation
    sequences: float | None = None  # of a step on all processes; None: by the tokens of the run
    processes: int = 1
    typed: dict[str, Any] = field(default_factory=dict)  # flags that the user typed


@dataclass(frozen=True)
class Candidate:
    """A model that a run may train."""

    settings: dict[str, int]  # flags of the model
    parameters: int
    flops: float  # model FLOPs per token
    length: float  # tokens per sequence
    rows: int  # sequences of a process in one micro-batch

    @property
    def name(self) -> str:
        """The shape in words, with the number of parameters."""
        layers = f"{self.settings['n_layers']} layers of dim {self.settings['dim']}"
        return f"{layers} ({self.parameters / 1e6:.3g} million parameters)"


@dataclass(frozen=True)
class Plan:
    """A model, and the run that fits into the time."""

    model: Candidate
    step_seconds: float
    accumulation: int
    steps: int
    tokens: float  # of the whole run
    passes: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.steps / self.step_seconds

    @property
    def excess(self) -> float:
        """Tokens per parameter divided by those that suit; above 1, the model is too small."""
        suits = TOKENS_PER_PARAMETER * (self.tokens / TOKENS) ** RISE
        worth = self.tokens
        if self.passes > 1:
            repeats = WORTH_PASSES * -math.expm1((1 - self.passes) / WORTH_PASSES)
            worth = self.tokens / self.passes * (1 + repeats)
        return worth / self.model.parameters / min(suits, MOST_PER_PARAMETER)


def shape_settings(n_layers: int, dim: int, typed: dict[str, Any]) -> dict[str, int]:
    """Return the model flags of a shape. Typed flags override them."""
    dim = typed.get("dim", dim)
    kv_heads, most = typed.get("n_kv_heads", 2), max(4, dim // 64)
    counts = range(max(kv_heads, most - most % kv_heads), 0, -kv_heads)
    heads = [n for n in counts if dim % (2 * n) == 0]
    length = 256 if dim < 384 else 512 if dim < 640 else 1024
    settings = {"n_layers": n_layers, "dim": dim, "n_heads": heads[0] if heads else 4}
    return {k: typed.get(k, v) for k, v in (settings | {"max_seq_len": length}).items()}


def choose(
    task: Task, models: list[Candidate], seconds: Callable[[Candidate], float], first: int = 0
) -> Plan:
    """Return the plan whose tokens per parameter suit the run best, among models of rising size.
    `seconds` returns the time of a step with one micro-batch. It is called for models[first],
    then for the next larger or smaller model, until two neighbours enclose the best size."""
    plans: dict[int, Plan] = {}
    index = first
    while 0 <= index < len(models) and index not in plans:
        plan = plan_for(task, models[index], seconds(models[index]))
        fixed = {"batch_size", "max_steps", "epochs"} & task.typed.keys()
        if plan.steps < LEAST_STEPS and plan.model.rows > 1 and not fixed:
            fewer = replace(plan.model, rows=max(1, plan.model.rows * plan.steps // LEAST_STEPS))
            plan = plan_for(task, fewer, seconds(fewer))
        plans[index] = plan
        index += 1 if plan.excess > 1 else -1
    return min(plans.values(), key=lambda plan: abs(math.log(plan.excess)))


def plan_for(task: Task, model: Candidate, seconds: float) -> Plan:
    """Return the run of a model. `seconds` is the time of a step with one micro-batch."""
    typed, together = task.typed, model.rows * model.length * task.processes  # tokens
    # Validation only passes forward, in a third of the time.
    affordable = together / seconds * task.seconds - EVALUATIONS * task.validation_tokens / 3
    tokens = max(MIN_STEPS * together, min(affordable, task.most_passes * task.tokens))
    batch = min(BATCH * max(1, tokens / TOKENS) ** BATCH_RISE, tokens / LEAST_STEPS)
    if task.sequences:
        batch = task.sequences * model.length
    accumulation = typed.get("accumulation_steps", max(1, round(batch / together)))
    steps = max(1, int(tokens / together / accumulation))
    if "epochs" in typed:
        steps = math.ceil(typed["epochs"] * task.copies * task.tokens / together / accumulation)
    steps = typed.get("max_steps", steps)
    tokens = steps * accumulation * together
    return Plan(model, seconds * accumulation, accumulation, steps, tokens, tokens / task.tokens)


def run_flags(plan: Plan) -> dict[str, Any]:
    """Return the flags of batch, steps and intervals."""
    every = math.ceil(plan.steps / EVALUATIONS)
    return {
        "batch_size": plan.model.rows,
        "accumulation_steps": plan.accumulation,
        "max_steps": plan.steps,
        "log_interval": max(1, plan.steps // LOG_LINES),
        "eval_interval": every,
        "sample_interval": every,
        "save_interval": every,
    }


def optimizer_flags(model: Candidate, muon: bool) -> dict[str, Any]:
    """Return the flags of optimizer and schedule for training from random weights."""
    # After the warm-up the rates fall in a straight line to 0.
    schedule = {"lr_schedule": "wsd", "decay_fraction": 1.0, "min_lr_ratio": 0.0}
    dim = model.settings["dim"]
    if not muon:
        return schedule | {"optimizer": "adamw", "learning_rate": rounded(3e-3 * 192 / dim)}
    rates = {"learning_rate": rounded(0.02 * (128 / dim) ** 0.5)}
    rates["muon_learning_rate"] = 0.03 if model.parameters < 1e7 else 0.02
    return schedule | {"optimizer": "muon"} | rates


def weight_decay(passes: float) -> float:
    """Return the weight decay of a run: repeated text needs more."""
    return rounded(min(0.5, max(0.1, 0.04 * passes)))


def fine_tuning_rate(dim: int) -> float:
    """Return the learning rate of fine-tuning; a narrow model takes a higher one."""
    return rounded(min(2e-3, 2e-3 * (192 / dim) ** 1.5))


def rounded(value: float) -> float:
    """Return a number with two significant digits."""
    return float(f"{value:.2g}")
