"""What each process holds of a model that is loaded in shares; run by test_divided_weights.py.

python -m tests.integration.divided_weights WEIGHTS FOLDER, started by a launcher: rank r writes
FOLDER/r.json.
"""

import json
import sys
from pathlib import Path

import torch

from inference.decoder import Decoder
from model import Transformer
from runs.weights import load_trained
from training.engine import zero_inference
from training.engine.zero_inference import ZeroInference


def main(weights: str, folder: str) -> None:
    whole = []  # elements that are together at a time
    gathered = zero_inference.gathered

    def noted(*parameters, **how):
        whole.append(sum(p.ds_numel for p in parameters))
        return gathered(*parameters, **how)

    zero_inference.gathered = noted
    zero = ZeroInference.of_launch(None, None)
    model: Transformer = load_trained(weights, zero.load).model
    shares = [p.ds_tensor for p in model.parameters()]
    facts = {
        "parameters": sum(p.ds_numel for p in model.parameters()),
        "held": sum(p.numel() for p in model.parameters()),
        "share": sum(share.numel() for share in shares),
        "where": sorted({share.device.type for share in shares}),
        "pos_cis": str(model.pos_cis.dtype),
    }
    Decoder(model, torch.float32, divided=True).read([[1, 2, 3]], capacity=4)
    facts["most together"] = max(whole)
    rank = torch.distributed.get_rank()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
