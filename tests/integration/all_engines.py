"""Every engine in turn in the same processes: what it holds and sends, how it trains, and how it
goes on from each other one's checkpoint. Started by test_engines.py, which reads what this leaves.

    accelerate launch --multi_gpu ... all_engines.py FOLDER ENGINE ...
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, distributed

from formats.portable import TensorFile, save_tensors
from model import LMConfig, Transformer
from model import loss as model_loss
from training.arguments import TrainingArguments
from training.build import build_model
from training.engine import launch as launch_engine
from training.engine.compilation import Compilation
from training.engine.deepspeed_config import read_config
from training.engine.launch import Engine, build_engine, plain_module
from training.interruption import leave
from training.optimizer import set_learning_rate

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# Of three processes none has as much of a matrix as another one.
CONFIG = LMConfig(dim=32, n_layers=2, n_heads=4, vocab_size=131, max_seq_len=16)
SAVED, STEPS, ACCUMULATION = 2, 3, 2
LINEAR = torch.nn.functional.linear
SCALAR = 1000  # elements; what is smaller is no part of the model
SENT = {
    "gradients": ("all_reduce", "reduce", "reduce_scatter_tensor"),
    "weights": ("all_gather", "all_gather_into_tensor"),
}


class Recorder:
    """The dtypes of what processes exchange, by what it is."""

    def __init__(self):
        self.seen = defaultdict(set)
        for what, names in SENT.items():
            for name in names:
                self._wrap(name, what)

    def note(self, what: str, *tensors: Tensor) -> None:
        self.seen[what] |= {str(t.dtype)[6:] for t in tensors if t.numel() >= SCALAR}

    def take(self) -> dict[str, list[str]]:
        seen, self.seen = self.seen, defaultdict(set)
        return {what: sorted(dtypes) for what, dtypes in seen.items() if dtypes}

    def _wrap(self, name: str, what: str) -> None:
        function = getattr(distributed, name)

        def noting(*args, **kwargs):
            given = [*args, *kwargs.values()]
            lists = [each for each in given if isinstance(each, list)]
            tensors = [each for each in chain(given, *lists) if isinstance(each, Tensor)]
            self.note(f"{what} sent", *tensors)
            return function(*args, **kwargs)

        setattr(distributed, name, noting)


def with_torch_adam(path: str) -> dict:
    """And with numbers by which even this model is let go of, block by block."""
    config = read_config(path)
    config["optimizer"]["params"]["torch_adam"] = True
    for key in ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size"):
        config["zero_optimization"][f"stage3_{key}"] = 1000
    return config


class Known:
    """As much of `Prepared` as building a model takes.

    Args:
        adapt: adds adapters to a model, in place.
    """

    def __init__(self, args: TrainingArguments, adapt: Callable[[Transformer], None]):
        args.adapt = adapt
        self.args, self.config = args, CONFIG
        with torch.device("meta"):
            self.shapes = Transformer(CONFIG)
            adapt(self.shapes)
        self.n_trained = sum(p.numel() for p in self.shapes.parameters() if p.requires_grad)

    def compilation(self, engine: Engine) -> Compilation:
        return Compilation(False, "of no matter")


class Trainee:
    """A model under one of configs/; behind "+torch" by PyTorch's AdamW instead of DeepSpeed's."""

    def __init__(self, name: str, dtype: str, recorder: Recorder, adapt=None, **arguments):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.nn.functional.linear = LINEAR  # ZeRO-3 leaves another one behind
        name, _, by_torch = name.partition("+")
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
            **arguments,
        )
        launch_engine.read_config = with_torch_adam if by_torch else read_config
        self.recorder = recorder
        self.engine = build_engine(args)
        self.accelerator = self.engine.accelerator
        known = Known(args, adapt or (lambda model: None))
        built = build_model(known, self.engine)
        self.model, self.optimizer, self.state = built.model, built.optimizer, built.state
        self.n_parameters = known.n_trained
        self.whole = 0  # elements that were there between a forward and its backward, at most
        base = built.optimizer.optimizer
        getattr(base, "optimizer", base).register_step_pre_hook(self._note_stepped)
        if name == "ddp":
            self.model.register_comm_hook(None, self._exchange)

    def _note_stepped(self, optimizer, args, kwargs) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                self.recorder.note("weights stepped", p)
                self.recorder.note("gradients stepped", p.grad)

    def _exchange(self, _, bucket):
        """As DDP does it without a hook."""
        buffer = bucket.buffer().div_(self.engine.processes)
        self.recorder.note("gradients sent", buffer)
        future = distributed.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

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
                here = sum(p.numel() for p in plain_module(self.model).parameters())
                self.whole = max(self.whole, here)
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

    def weights_of(self, path: Path) -> Mapping[str, Tensor]:
        return TensorFile(path / "weights")

    def load(self, path: Path) -> None:
        tensors = self.weights_of(path), TensorFile(path / "moments")
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
            for name, expected in TensorFile(end / file).items() if tensors else ():
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
    recorder, result = Recorder(), {"fp32": {}, "bf16": {}, "resumed": {}, "in chunks": {}}
    for name in names:
        trainee = Trainee(name, "float32", recorder)
        facts = trainee.facts()
        recorder.take()
        facts["losses"] = [trainee.step(number) for number in range(1, SAVED + 1)]
        facts |= recorder.take()
        trainee.save(folder / name)
        facts["losses"] += [trainee.step(number) for number in range(SAVED + 1, STEPS + 1)]
        trainee.save(folder / f"{name}-end")
        facts["whole"] = trainee.whole
        result["fp32"][name] = facts
    for name in names:
        trainee = Trainee(name, "float32", recorder)
        result["resumed"][name] = {
            before: trainee.goes_on(folder / before, folder / f"{before}-end") for before in names
        }
        # As of a large vocabulary, in chunks of 8 tokens.
        model_loss.LARGE_VOCABULARY, model_loss.CHUNK_LOGITS = 100, 10 * CONFIG.vocab_size
        result["in chunks"][name] = trainee.goes_on(folder / name, folder / f"{name}-end")
        model_loss.LARGE_VOCABULARY = CONFIG.vocab_size
    for name in names:
        trainee = Trainee(name, "bfloat16", recorder)
        facts = trainee.facts()
        recorder.take()
        facts["losses"] = [trainee.step(1)]
        result["bf16"][name] = facts | recorder.take()
    if trainee.engine.is_main:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    finally:
        leave()
