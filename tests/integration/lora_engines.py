"""Adapters under every engine in turn in the same processes: what is trained, what stays, and how
they go on from each other's checkpoints. Started by test_lora_launch.py, which reads the result.

    accelerate launch --multi_gpu ... lora_engines.py FOLDER ENGINE ...
"""

import json
import sys
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

import torch
from all_engines import CONFIG, SAVED, STEPS, Recorder, Trainee
from torch import Tensor

from formats.portable import TensorFile
from inference.decoder import Decoder
from model import Transformer
from model.lora import LoRA, add_lora
from training.engine.launch import plain_module
from training.interruption import leave

ADAPTERS = LoRA(dim=4, alpha=32.0, module_name="layers", only_lora=True)
# `step` has the learning rate twenty times as large as it is meant to be.
MUON = {"optimizer": "muon", "muon_learning_rate": 1e-3}
PROMPT = torch.arange(9)[None]


class Adapted(Trainee):
    """A model with the weights of `base`, which the seed does not draw, and adapters."""

    def __init__(self, name: str, dtype: str, recorder: Recorder, base: dict, **arguments):
        super().__init__(
            name, dtype, recorder, lambda m: add_lora(m, **vars(ADAPTERS)), **arguments
        )
        self.base, self.dtype = base, getattr(torch, dtype)
        self.state.load_weights(self.base, "base")

    def weights_of(self, path: Path) -> Mapping[str, Tensor]:
        return ChainMap(TensorFile(path / "weights"), self.base)

    def facts(self) -> dict:
        module = plain_module(self.model)
        frozen = [p for p in module.parameters() if not p.requires_grad]
        here = (
            self.state._frozen() if self.engine.divides_model else dict(module.named_parameters())
        )
        whole = self.state.whole_model()
        self.model.eval()
        with torch.no_grad():
            logits = self.model(PROMPT.to(self.accelerator.device)).logits
        self.model.train()
        facts = {
            "trained": sorted(self.state.weights()),
            "moments": sorted(self.state.moments()),
            "without gradient": all(p.grad is None for p in frozen),
            "frozen": sorted({str(p.dtype)[6:] for p in frozen}),
        }
        if self.engine.is_main:
            facts["as the base"] = all(
                torch.equal(here[name].float(), weight.to(self.dtype).float())
                for name, weight in self.base.items()
            )
            written = Decoder(whole, torch.float32).read(PROMPT.tolist(), capacity=9)
            facts["whole"] = (written - logits[:, -1].float()).abs().max().item()
        return facts


def main(folder: Path, names: list[str]) -> None:
    recorder, result = Recorder(), {"float32": {}, "bfloat16": {}, "resumed": {}, "muon": {}}
    torch.manual_seed(7)  # another one than that of training
    base = {name: p.detach() for name, p in Transformer(CONFIG).named_parameters()}
    for dtype in ("float32", "bfloat16"):
        for name in names:
            trainee = Adapted(name, dtype, recorder, base)
            losses = [trainee.step(number) for number in range(1, SAVED + 1)]
            saved, end = (folder / f"{name}-{dtype}{what}" for what in ("", "-end"))
            trainee.save(saved)
            losses += [trainee.step(number) for number in range(SAVED + 1, STEPS + 1)]
            trainee.save(end)
            facts = trainee.facts() | {"losses": losses, "parameters": trainee.n_parameters}
            facts["goes on"] = trainee.goes_on(saved, end)
            result[dtype][name] = facts
    for name in names:
        trainee = Adapted(name, "float32", recorder, base)
        result["resumed"][name] = {
            before: trainee.goes_on(folder / f"{before}-float32", folder / f"{before}-float32-end")
            for before in names
        }
    for name in ("ddp", "zero2"):
        trainee = Adapted(name, "float32", recorder, base, **MUON)
        losses = [trainee.step(number) for number in range(1, SAVED + 1)]
        trainee.save(folder / f"{name}-muon")
        losses += [trainee.step(number) for number in range(SAVED + 1, STEPS + 1)]
        trainee.save(folder / f"{name}-muon-end")
        resumed = trainee.goes_on(folder / f"{name}-muon", folder / f"{name}-muon-end")
        facts = {"losses": losses, "goes on": resumed, "moments": sorted(trainee.state.moments())}
        result["muon"][name] = facts
    if trainee.engine.is_main:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    finally:
        leave()
