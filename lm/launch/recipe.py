"""Compute the model, the batch and the steps of run_accelerate.sh for a text, machine and time.

`choose` measures nothing: it gets a function that returns the `Speed` of a model.
docs/recipe.md has the measurements behind the numbers; benchmarks.variants compares shapes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lm.common.numbers import counted
from lm.training.measurement import Speed
from lm.training.schedule import BATCH
from model import ConfigError, LMConfig

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
SAMPLED_SOFTMAX = 16  # on a CPU with a micro-batch of BATCH tokens
SAMPLED_SHARE = 0.25  # of the pieces that a token is compared with, roughly
SAMPLED_FROM = 8192  # pieces; with fewer, as for a text below 4 MB, the loss compares all of them
ROPE_THETA = 1e4  # as in Llama 1 and 2, for contexts up to 4,096 tokens


@dataclass(frozen=True)
class Task:
    """The data of a run, and its time."""

    seconds: float  # for training steps and validations
    tokens: float  # training tokens of one pass over the text
    most_passes: float  # over the text
    samples: int = 0  # sequences of a validation, if time allows
    validates_first: bool = False  # also before the first step, as fine-tuning does
    has_teacher: bool = False  # the model learns from a teacher
    processes: int = 1
    typed: dict[str, Any] = field(default_factory=dict)  # flags that the user typed

    @property
    def steps_are_typed(self) -> bool:
        """True if flags decide the number of steps, whatever the time."""
        return not {"max_steps", "epochs"}.isdisjoint(self.typed)


@dataclass(frozen=True)
class Candidate:
    """A model that a run may train."""

    settings: dict[str, Any]  # flags of the model
    parameters: int  # that compute for a token
    counted: int  # those that the rule for the shape counts
    flops: float  # FLOPs per token, including the teacher's forward pass
    length: float  # mean tokens per sequence
    rows: int  # sequences per process in one micro-batch; 0: the model does not fit into memory
    rows_alone: int = 0  # at most so many if this process trains alone

    @property
    def name(self) -> str:
        """The shape in words, with the number of parameters."""
        shape = f"{counted(self.settings['n_layers'], 'layers')} of dim {self.settings['dim']}"
        return f"{shape} ({self.parameters / 1e6:,.2f} million parameters)"


@dataclass(frozen=True)
class Plan:
    """A model, and its batch, steps and validations."""

    model: Candidate
    speed: Speed
    accumulation: int
    steps: int
    tokens: float  # training tokens of the whole run
    passes: float  # over the text
    excess: float  # tokens per parameter / the number that suits; above 1 the model is too small
    evaluations: int  # validations after the first step
    samples: int  # sequences of one validation

    @property
    def seconds(self) -> float:
        """Seconds of all steps, without validations."""
        return self.steps * self.accumulation * self.speed.step


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


def valid_shapes(typed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the model flags of each of SHAPES that is valid with the typed flags. Raises
    ConfigError if none is valid."""
    found, problems = [], []
    for shape in SHAPES:
        settings = shape_settings(*shape, typed)
        try:
            LMConfig(head_dim=typed.get("head_dim"), **settings)
            found += [settings] if settings not in found else []
        except ConfigError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return found


def loss_flags(model: Candidate, pieces: int, on_gpu: bool) -> dict[str, Any]:
    """Return the flags for the loss over a vocabulary of so many `pieces`. In a small micro-batch
    each piece is compared with as many tokens as in a large one. --sampled_softmax was not measured
    on a GPU, where micro-batches are larger and have more different targets."""
    parts = min(SAMPLED_SOFTMAX, int(SAMPLED_SOFTMAX * model.rows * model.length / BATCH))
    return {} if on_gpu or pieces < SAMPLED_FROM or parts < 2 else {"sampled_softmax": parts}


def choose(task: Task, models: list[Candidate], speed: Callable[[Candidate], Speed]) -> Plan:
    """Return the plan whose tokens per parameter suit the run best."""
    plans = [plan_rows(task, model, speed(model)) for model in models]
    return min(plans, key=lambda plan: abs(math.log(plan.excess)))


def plan_rows(task: Task, model: Candidate, speed: Speed) -> Plan:
    """Return the plan of a model. If it has fewer than LEAST_STEPS steps of one micro-batch, and
    the rows may change, it gets smaller micro-batches as long as this makes its steps more, and
    hardly its tokens fewer."""
    plans = [plan_for(task, model, speed)]
    typed = task.typed.get("accumulation_steps", 1)
    changes = not (task.steps_are_typed or "batch_size" in task.typed)
    # A plan that accumulates more needs less accumulation, not smaller micro-batches.
    while changes and plans[-1].steps < LEAST_STEPS and plans[-1].accumulation <= typed:
        rows = max(1, plans[-1].model.rows * plans[-1].steps // LEAST_STEPS)
        plan = plan_for(task, replace(model, rows=rows), speed.with_rows(rows, model.rows))
        if plan.steps <= plans[-1].steps:
            break
        plans.append(plan)
    most = max(plan.tokens for plan in plans)
    return next(plan for plan in reversed(plans) if plan.tokens >= NEARLY * most)


def plan_for(task: Task, model: Candidate, speed: Speed) -> Plan:
    """Return the plan for a model of this speed, with at least one step."""
    typed, together = task.typed, model.rows * model.length * task.processes  # tokens
    evaluations, samples = validations(task, model, speed)
    validating = (evaluations + task.validates_first) * samples * speed.sample / task.processes
    affordable = max(0, task.seconds - validating) / speed.step * together  # tokens
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
    # Repeated tokens count in full, for the reason in docs/recipe.md.
    worth = tokens * (WITH_TEACHER if task.has_teacher else 1)
    suitable = min(TOKENS_PER_PARAMETER * max(1, worth / TOKENS) ** RISE, MOST_PER_PARAMETER)
    return Plan(
        model=model,
        speed=speed,
        accumulation=accumulation,
        steps=steps,
        tokens=tokens,
        passes=tokens / task.tokens,
        excess=worth / model.counted / suitable,
        evaluations=math.ceil(evaluations),
        samples=samples,
    )


def validations(task: Task, model: Candidate, speed: Speed) -> tuple[float, int]:
    """Return the number of validations after the first step, and the sequences of each, for which
    VALIDATION_SHARE of the time suffices. Where flags decide the steps, the time does not."""
    if not task.samples or task.steps_are_typed:
        return EVALUATIONS, task.samples
    typed, first = "eval_samples" in task.typed, int(task.validates_first)
    least = task.samples if typed else min(task.samples, LEAST_SAMPLES)
    sample_seconds = speed.sample / task.processes
    affordable = int(VALIDATION_SHARE * task.seconds / sample_seconds)
    interval = task.typed.get("eval_interval")
    if interval is None:
        evaluations = max(1, min(EVALUATIONS, affordable // least - first))
    else:  # 0: only at the end
        steps = plan_for(replace(task, samples=0), model, speed).steps
        evaluations = steps / min(interval or steps, steps)
    most = task.samples if typed else int(affordable / (evaluations + first))
    samples = max(1, min(task.samples, most))
    if interval:  # validations take time from the steps, so that there are fewer of both
        share = evaluations * samples * sample_seconds / task.seconds
        evaluations /= 1 + share
    return evaluations, samples
