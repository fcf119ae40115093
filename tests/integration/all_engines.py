"""Every engine in turn in the same processes: what it holds, how it trains, and how it goes on from
each other one's checkpoint. Started by test_engines.py, which reads what this leaves.

    accelerate launch --multi_gpu ... all_engines.py FOLDER ENGINE ...
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, distributed

from formats.portable import load_tensors, save_tensors
from model import LMConfig, Transformer
from training.arguments import TrainingArguments
from training.build import build_model
from training.engine.launch import build_engines, plain_module
from training.interruption import leave
from training.optimizer import set_learning_rate

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# Of three processes none has as much of a matrix as another one.
CONFIG = LMConfig(dim=32, n_layers=2, n_heads=4, vocab_size=131, max_seq_len=16)
SAVED, STEPS, ACCUMULATION = 2, 3, 2
LINEAR = torch.nn.functional.linear


class Known:
    """As much of `Prepared` as building a model takes."""

    def __init__(self, args: TrainingArguments):
        self.args, self.config = args, CONFIG
        with torch.device("meta"):
            self.shapes = Transformer(CONFIG)
        self.n_trained = self.shapes.num_parameters()
        self.total_steps, self.start = STEPS, SimpleNamespace(state={})
        self.train_set = SimpleNamespace(tokens_per_sample=CONFIG.max_seq_len)


class Trainee:
    """A model under one of configs/."""

    def __init__(self, name: str, dtype: str):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.nn.functional.linear = LINEAR  # ZeRO-3 leaves another one behind
        launch = yaml.safe_load((REPOSITORY / "configs" / f"{name}.yaml").read_text())
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        if "deepspeed_config" in launch:
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            file = REPOSITORY / launch["deepspeed_config"]["deepspeed_config_file"]
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)
        args = TrainingArguments(
            batch_size=2,
            accumulation_steps=ACCUMULATION,
            dtype=dtype,
            grad_clip=0.1,
            compile="off",
        )
        self.stepped = set()  # dtypes of weights and gradients that the optimizer steps
        self.engine = build_engines([args])[0]
        self.accelerator = self.engine.accelerator
        known = Known(args)
        built = build_model(known, self.engine)
        self.model, self.optimizer, self.state = built.model, built.optimizer, built.state
        self.n_parameters = known.n_trained
        base = built.optimizer.optimizer
        getattr(base, "optimizer", base).register_step_pre_hook(self._note_stepped)

    def _note_stepped(self, optimizer, args, kwargs) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                self.stepped |= {str(p.dtype)[6:], str(p.grad.dtype)[6:]}

    def step(self, number: int) -> float:
        """The loss of all processes."""
        set_learning_rate(self.optimizer, 1e-2 / number)
        total = torch.zeros(())
        for micro_batch in range(ACCUMULATION):
            seed = (number * ACCUMULATION + micro_batch) * 100 + self.accelerator.process_index
            generator = torch.Generator().manual_seed(seed)
            first = torch.randint(CONFIG.vocab_size, (2, 1), generator=generator)
            tokens = (first + torch.arange(17)) % CONFIG.vocab_size  # that can be learned
            with self.accelerator.accumulate(self.model):
                loss = self.model(tokens[:, :-1], tokens[:, 1:]).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += loss.detach().float() / ACCUMULATION
        return self.accelerator.reduce(total, "mean").item()

    def save(self, path: Path) -> None:
        weights, moments, scalars = self.state.weights(), self.state.moments(), self.state.scalars()
        if self.engine.is_main:
            path.mkdir()
            save_tensors(path / "weights", weights)
            save_tensors(path / "moments", moments)
            (path / "scalars").write_text(json.dumps(scalars))
        distributed.barrier()

    def load(self, path: Path) -> None:
        tensors = load_tensors(path / "weights"), load_tensors(path / "moments")
        self.state.load(*tensors, json.loads((path / "scalars").read_text()), str(path))

    def goes_on(self, path: Path, end: Path) -> dict:
        """From one checkpoint: its losses, and how far it is from another checkpoint then."""
        self.load(path)
        losses = [self.step(number) for number in range(SAVED + 1, STEPS + 1)]
        difference = 0.0
        for file, tensors in {
            "weights": self.state.weights(),
            "moments": self.state.moments(),
        }.items():
            for name, expected in load_tensors(end / file).items() if tensors else ():
                scale = 1.0 if file == "weights" else expected.abs().max().item()
                here = (tensors[name] - expected).abs().max().item() / scale
                difference = max(difference, here)
        return {"losses": losses, "difference": difference}

    def facts(self) -> dict:
        """What it is made of, after it has been built."""
        module = plain_module(self.model)
        dtypes = {p.dtype for p in module.parameters()}
        torch.manual_seed(TrainingArguments.seed)
        plain = dict(Transformer(CONFIG).named_parameters())
        starts = self.state.weights()  # in the model's precision, as DeepSpeed begins
        return {
            "name": self.engine.name,
            "parameters": self.n_parameters,
            "held": sum(p.numel() for p in module.parameters()),
            "pos_cis": str(module.pos_cis.dtype),
            "weights": sorted(str(dtype)[6:] for dtype in dtypes),
            "by": type(self.state.optimizer).__name__,
            "starts as drawn": all(
                torch.equal(weights, plain[name].to(*dtypes).float())
                for name, weights in starts.items()
            ),
            "moments": sorted({str(m.dtype)[6:] for m in self._moments()}),
        }

    def _moments(self) -> list[Tensor]:
        return [m for _, _, held in self.state._shards() for m in held.moments.values()]


def main(folder: Path, names: list[str]) -> None:
    result = {"fp32": {}, "bf16": {}, "resumed": {}}
    for name in names:
        trainee = Trainee(name, "float32")
        facts = trainee.facts()
        facts["losses"] = [trainee.step(number) for number in range(1, SAVED + 1)]
        trainee.save(folder / name)
        facts["losses"] += [trainee.step(number) for number in range(SAVED + 1, STEPS + 1)]
        trainee.save(folder / f"{name}-end")
        result["fp32"][name] = facts | {"stepped": sorted(trainee.stepped)}
    for name in names:
        trainee = Trainee(name, "float32")
        result["resumed"][name] = {
            before: trainee.goes_on(folder / before, folder / f"{before}-end") for before in names
        }
    for name in names:
        trainee = Trainee(name, "bfloat16")
        facts = trainee.facts()
        facts["losses"] = [trainee.step(1)]
        result["bf16"][name] = facts | {"stepped": sorted(trainee.stepped)}
    if trainee.engine.is_main:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    finally:
        leave()
