"""train_pretrain_accelerate.py with adapters on the weights that --init_from names, and all that is
not under them trained too. Started by test_lora_launch.py."""

from functools import partial

import train_pretrain_accelerate
from model.lora import add_lora
from runs.base import write_base
from training import setup
from training.engine.main_process import on_main_process
from training.initial_weights import InitialWeights
from training.run import Run


def run_with_base(args, engine, start, built, *, train_set, **others) -> Run:
    if start.checkpoint is None:
        weights = InitialWeights.find(args.init_from, {}).load()
        keep = partial(write_base, start.folder, built.config, weights, train_set.tokenizer_path)
        on_main_process(engine.accelerator, keep)
    return Run(args, engine, start, built, train_set=train_set, **others)


if __name__ == "__main__":
    adapt = partial(add_lora, dim=4, alpha=32.0, only_lora=False)
    train_pretrain_accelerate.build_model = partial(setup.build_model, adapt=adapt)
    train_pretrain_accelerate.Run = run_with_base
    train_pretrain_accelerate.main()
    train_pretrain_accelerate.leave()
