r"""Estimate memory, network traffic and hours of training with each engine.

    python -m scripts.plan --dim 1024 --n_layers 32 --max_seq_len 1024 --batch_size 24 \
        --accumulation_steps 32 --num_processes 4 --gpu_memory 48 --device "RTX 6000 Ada"
"""

import math

from lm.common.errors import UsageError, one_line_errors
from lm.common.numbers import columns, counted, memory
from lm.engine.hardware import GIB
from lm.engine.memory import OVERHEAD, estimate, fits, largest_batch
from lm.engine.plan import GPUS, LOSS, RATES, Plan, plan_of
from lm.engine.strategy import GPU, Strategy
from lm.formats.portable import without_memory
from lm.training.arguments import as_arguments, build_parser
from model import ConfigError, LMConfig
from scripts.model_flags import at_least_1

# The training flags that change the estimate. The flags of the model change it too.
TRAINING_FLAGS = "accumulation_steps", "batch_size", "compile", "dtype", "gradient_checkpointing"
TRAINING_FLAGS += "coalesce_reduction", "max_steps", "optimizer", "tf32"


@one_line_errors("plan", UsageError, ConfigError)
def main(argv: list[str] | None = None) -> None:
    parser = build_parser(only=TRAINING_FLAGS)
    parser.prog, parser.description = "python -m scripts.plan", __doc__
    add = parser.add_argument_group("plan").add_argument
    add("--num_processes", type=at_least_1, default=1, help="processes, one per GPU")
    add("--num_machines", type=at_least_1, help=f"machines (default: of {GPUS} GPUs each)")
    links = f"GB/s that it reaches, or NAME or NxNAME of {', '.join(RATES)}"
    of_gpu = "a GPU's link to the others of its machine"
    add("--link", help=f"{of_gpu}: {links} (default: by the name of the GPU)")
    add("--network", default="ethernet100", help="a machine's links to the others, as --link")
    add("--vocab_size", type=int, default=6400, help="vocabulary size of the tokenizer")
    add("--gpu_memory", type=float, help="memory of a GPU in GiB (default: this machine's)")
    ram = "RAM of all processes in GiB (default with this machine's GPUs: its)"
    add("--ram", type=float, help=ram)
    add("--device", help="name of the GPU, such as 'H100' (default: this machine's GPU)")
    add("--mfu", type=float, default=0.4, help="model FLOPs utilization without sending")
    add("--tokens", type=float, help="training tokens (default: max_steps, or 20 per parameter)")
    flags = parser.parse_args(argv)
    typed, _ = build_parser(only=TRAINING_FLAGS).parse_known_args(argv)
    args, model_settings = as_arguments(vars(typed))
    shapes = without_memory(LMConfig(**model_settings, vocab_size=flags.vocab_size))
    print(describe(plan_of(args, shapes, flags), flags.mfu))


def describe(plan: Plan, mfu: float) -> str:
    """Return the table and the advice."""
    args, shapes, processes = plan.work.args, plan.work.shapes, plan.work.processes
    step = args.global_batch(processes) * shapes.config.max_seq_len  # tokens
    machines = math.ceil(processes / plan.network.per_machine)
    link, network, pcie = plan.links
    lines = [
        f"{shapes.num_parameters() / 1e6:.2f} million parameters, {step:,} tokens per step, "
        f"{step * plan.steps / 1e9:.3g} billion tokens in {counted(round(plan.steps), 'steps')}",
        f"{counted(processes, 'processes')}, {plan.memory / GIB:.1f} GiB per process, of "
        f"which {OVERHEAD // GIB} for libraries; {plan.gpu} at {mfu:.0%} MFU",
        f"{counted(machines, 'machines')}; {link} in a machine, {network} between machines, "
        f"{pcie} to RAM\n",
        columns([row(plan, strategy) for strategy in plan.engines]),
        "Lost: share of the time in which a GPU waits.\n"
        f"Most GPUs: the largest power of two that loses less than {LOSS:.0%} of the time.\n"
        "≥: plus the time of AdamW on the CPU and the time of NVMe, which are not known."
        if plan.computing
        else f"Hours are unknown for {plan.gpu} in {args.dtype}: pass a --device such as H100",
    ]
    fitting = (x for x in plan.engines if fits(x, plan.work, plan.memory, plan.ram))
    if (chosen := next(fitting, None)) is None:
        return "\n".join([*lines, "\nNo engine fits: take a smaller --batch_size or more memory."])
    lines.append(f"\nTake {chosen.name}, the first that fits, with your model's flags:")
    lines.append(f"ENGINE={chosen.config} bash run_accelerate.sh")
    if plan.computing:
        most = counted(plan.most_processes(chosen), "GPUs")
        lines.append(f"More than {most} would lose {LOSS:.0%} of the time or have no sequence.")
    return "\n".join(lines)


def row(plan: Plan, strategy: Strategy) -> dict[str, str]:
    """Return the row of an engine in the table."""
    expected = estimate(plan.as_trained(strategy), plan.work)
    time = plan.shared_by(plan.work.processes, strategy)
    is_least = strategy.optimizer_on != GPU and not plan.work.on_cpu
    memory_and_traffic = {
        "engine": strategy.name,
        "memory" if plan.work.on_cpu else "GPU memory": memory(expected.peak),
        "RAM": memory(expected.ram) if expected.ram else "0",
        "largest batch": str(largest_batch(strategy, plan.work, plan.memory)),
        "GB sent": f"{time.sent / 1e9:.2f}",
    }
    if not plan.computing:
        return memory_and_traffic
    return memory_and_traffic | {
        "hours": "≥ " * is_least + f"{time.seconds * plan.steps / 3600:.3g}",
        "lost": f"{time.lost:.0%}",
        "most GPUs": f"{plan.most_processes(strategy):,}",
    }


if __name__ == "__main__":
    main()
