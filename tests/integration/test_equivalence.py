"""The same global batch gives the same run on every engine and in plain PyTorch."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, Trained, injected, launch_command, train, train_command
from torch.nn import functional as F

from lm.data.dataset import PackedDataset
from lm.data.order import MicroBatchSampler
from model import LMConfig, Transformer
from train_pretrain_accelerate import main

pytestmark = pytest.mark.slow

STEPS, GLOBAL_BATCH, SEQ_LEN, SEED = 10, 24, 32, 7
PEAK, MUON_PEAK, WARMUP = 1e-3, 0.02, 2
CLIPPED = 0.1
TOLERANCE = 1e-4
# name → engine, processes, batch_size, accumulation_steps; each global batch has 24 sequences
SPLITS = {
    "plain 1 x 12 x 2 accumulation": ("plain", 1, 12, 2),
    "DDP 3 x 1 x 8 accumulation": ("ddp", 3, 1, 8),
    "ZeRO-1 2 x 12": ("zero1", 2, 12, 1),
    "ZeRO-2 3 x 1 x 8 accumulation": ("zero2", 3, 1, 8),
    "ZeRO-3 2 x 12": ("configs/zero3.yaml", 2, 12, 1),
    # "round_robin_gradients" distributes the parameters in another order.
    "round robin": ("round robin", 2, 12, 1),
}
PLAIN, DDP, ZERO_1, ZERO_2, ZERO_3, ROUND_ROBIN = SPLITS

MUON = f"--optimizer muon --muon_learning_rate {MUON_PEAK}"
EXPERTS = "--use_moe --qk_norm --n_routed_experts"
# Ways to train. All clip the gradients. A sampled loss depends on the micro-batch, here of 12. With
# AdamW there are more experts than a micro-batch uses. Muon would make the rounding errors of an
# expert with few tokens as large as the rest of its update.
HOW = {
    "dense": "",
    "sampled": "--sampled_softmax 5",
    "muon": MUON,
    "experts": f"{EXPERTS} 64",
    "experts by muon": f"{EXPERTS} 4 {MUON}",
}


def by_hand(data: Path) -> dict:
    """Train in one process with whole global batches, without code of `lm/training/`."""
    train_set = PackedDataset(data, "train", SEQ_LEN)
    torch.manual_seed(SEED)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": SEQ_LEN}
    model = Transformer(LMConfig(**shape, vocab_size=train_set.vocab_size))
    matrices, scales = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    batches = iter(MicroBatchSampler(len(train_set), GLOBAL_BATCH, seed=SEED))
    losses, grad_norms = [], []
    for step in range(1, STEPS + 1):
        wave = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
        rate = step / WARMUP if step < WARMUP else 0.1 + 0.9 * wave
        samples = [train_set[i] for i in next(batches)]
        tokens, targets = (torch.stack(part) for part in zip(*samples, strict=True))
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        for p in model.parameters():
            p.grad *= CLIPPED / norm
        for group in optimizer.param_groups:
            group["lr"] = PEAK * rate
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
        grad_norms.append(norm.item())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    keys = ("exp_avg", "exp_avg_sq")
    of_each = ((name, optimizer.state[p]) for name, p in model.named_parameters())
    moments = {f"{name}.{key}": state[key] for name, state in of_each for key in keys}
    return {"loss": losses, "grad_norm": grad_norms, "weights": weights, "optimizer": moments}


def results(run: Trained) -> dict:
    """Return what `by_hand` returns."""
    columns = {key: run.column(key) for key in ("loss", "grad_norm")}
    return columns | {file: run.tensors(file) for file in ("weights", "optimizer")}


def assert_equal(ours: dict, theirs: dict) -> None:
    """Compare results. Moments are compared relatively, because "exp_avg_sq" is tiny."""
    for key in ("loss", "grad_norm"):
        assert ours[key] == pytest.approx(theirs[key], abs=TOLERANCE)
    for file in ("weights", "optimizer"):
        assert ours[file].keys() == theirs[file].keys()
        for name, expected in theirs[file].items():
            scale = 1 if file == "weights" else 10 * expected.abs().max()
            assert (ours[file][name] - expected).abs().max() <= TOLERANCE * scale, name


def start(how: str, name: str, packed: Path, path: Path, more: str = "", *program: str) -> Trained:
    """Train in the way `how` with the engine, processes and micro-batches of SPLITS[name], without
    an engine in this process."""
    engine, processes, batch_size, accumulation_steps = SPLITS[name]
    if engine == "round robin":
        config = json.loads((REPOSITORY / "ds_config.json").read_text(encoding="utf-8"))
        config["zero_optimization"]["round_robin_gradients"] = True
        engine = path.parent / "ds.json"
        engine.write_text(json.dumps(config), encoding="utf-8")
    flags = (
        f"--batch_size {batch_size} --accumulation_steps {accumulation_steps} "
        f"--grad_clip {CLIPPED} --max_steps {STEPS} --learning_rate {PEAK} "
        f"--warmup_steps {WARMUP} --seed {SEED} --dtype float32 --save_interval 3 {HOW[how]} {more}"
    )
    if engine == "plain":
        main(train_command([], 1, packed, path, flags))
        return Trained(path, "")
    return train(launch_command(engine, processes, *program), processes, packed, path, flags)


@pytest.fixture(scope="module")
def runs(packed, tmp_path_factory):
    """Returns the run of `how` and `name`. Only the first call launches it."""
    out_dir = tmp_path_factory.mktemp("runs")
    return cache(lambda how, name: start(how, name, packed, out_dir / f"{how} {name}"))


def test_one_process_trains_as_plain_pytorch_does(runs, packed):
    expected = by_hand(packed)
    assert min(expected["grad_norm"]) > 2 * CLIPPED  # clipping has an effect
    assert_equal(results(runs("dense", PLAIN)), expected)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *(("sampled", ZERO_3), ("muon", DDP), ("experts by muon", ZERO_2)),
        *(("experts", name) for name in (DDP, ZERO_1, ZERO_2, ZERO_3)),
    ],
)
def test_every_engine_trains_as_one_process_does(how, name, runs):
    expected = results(runs(how, PLAIN))
    assert_equal(results(runs(how, name)), expected)
    dense = runs("dense", PLAIN).column("loss")
    assert expected["loss"] != pytest.approx(dense, abs=10 * TOLERANCE)  # it has an effect


def test_experts_that_get_no_token_in_any_step_are_only_decayed(runs):
    run = runs("experts", DDP)
    assert run.column("idlest_expert") == [0.0] * STEPS
    assert all(1 < value < 64 for value in run.column("balancing_loss"))
    moments = run.tensors("optimizer")["layers.1.feed_forward.w1.exp_avg_sq"]
    idle = ~moments.flatten(1).any(dim=1)
    assert 0 < idle.sum() < 64
    before, after = (run.tensors(step=step)["layers.1.feed_forward.w1"] for step in (6, STEPS))
    decay = math.prod(1 - 0.1 * rate for rate in run.column("learning_rate")[6:])
    torch.testing.assert_close(after[idle], decay * before[idle], atol=1e-7, rtol=0)


def test_zero_2_reduces_each_gradient_once_per_step(runs, packed, tmp_path):
    counts = []
    for flag in ("", "--no-coalesce_reduction"):
        file = tmp_path / f"counts{flag}"
        said = f"open({str(file)!r}, 'a').write(f'{{args[0].numel()}}\\n')"
        note = f"if os.environ['RANK'] == '0': {said}"
        program = injected(tmp_path / "counts.py", "deepspeed.comm.all_reduce", note)
        run = start("dense", ZERO_2, packed, tmp_path / f"run{flag}", flag, program)
        assert ("ZeRO-2, one reduction per step" in run.out) == (flag == "")
        assert_equal(results(run), results(runs("dense", PLAIN)))
        counts.append(sum(map(int, file.read_text().split())))
    n = sum(tensor.numel() for tensor in run.tensors().values())
    assert STEPS * n <= counts[0] < 1.01 * STEPS * n
    assert counts[1] == counts[0] + 7 * STEPS * n  # 8 reductions per step


def test_momenta_of_muon_are_divided_anew_under_another_engine(runs, packed, tmp_path):
    """AdamW's moments: test_engines.py."""
    path = runs("muon", PLAIN).stopped_after(6, tmp_path / "stopped")
    resumed = start("muon", ROUND_ROBIN, packed, path, f"--resume {path}")
    assert_equal(results(resumed), results(runs("muon", PLAIN)))


@pytest.mark.parametrize(
    ("how", "name", "what"),
    [
        ("sampled", PLAIN, "selective"),
        ("sampled", ZERO_3, "blocks"),
        ("experts", ZERO_2, "blocks"),
    ],
)
def test_a_resume_with_recomputation_is_equal_to_the_bit(how, name, what, runs, packed, tmp_path):
    whole = runs(how, name)
    path = whole.stopped_after(6, tmp_path / "stopped")
    more = f"--gradient_checkpointing {what} --resume {path}"
    resumed = start(how, name, packed, path, more)
    assert resumed.column("loss") == whole.column("loss")
    assert resumed.ends_as(whole)
