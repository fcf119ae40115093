"""The same global batch gives the same run on every engine and in plain PyTorch."""

import math
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import Trained, deepspeed_file, launch_command, train
from masked_pretraining import MaskedDataset
from small_model import loss_of_sampled_pieces
from torch.nn import functional as F

from lm.data.dataset import PackedDataset
from lm.data.order import MicroBatchSampler
from model import IGNORE_INDEX, LMConfig, Transformer

pytestmark = pytest.mark.slow

STEPS, GLOBAL_BATCH, SEQ_LEN, SEED = 10, 24, 32, 7
PEAK, MUON_PEAK, WARMUP = 1e-3, 0.02, 2
CLIPPED = 0.1
TOLERANCE = 1e-4
# name → engine, processes, batch_size, accumulation_steps; each global batch has 24 sequences
SPLITS = {
    "plain 1 x 24": ("plain", 1, 24, 1),
    "plain 1 x 3 x 8 accumulation": ("plain", 1, 3, 8),
    "plain 1 x 12 x 2 accumulation": ("plain", 1, 12, 2),
    "DDP 3 x 1 x 8 accumulation": ("ddp", 3, 1, 8),
    "ZeRO-1 2 x 12": ("zero1", 2, 12, 1),
    "ZeRO-2 2 x 12": ("zero2", 2, 12, 1),
    "ZeRO-2 3 x 1 x 8 accumulation": ("zero2", 3, 1, 8),
    "ZeRO-3 2 x 12": ("configs/zero3.yaml", 2, 12, 1),
    # "round_robin_gradients" distributes the parameters in another order.
    "round robin": ("round robin", 2, 12, 1),
}
PLAIN, ACCUMULATED, DDP, ZERO_1, ZERO_2 = (
    *("plain 1 x 24", "plain 1 x 3 x 8 accumulation", "DDP 3 x 1 x 8 accumulation"),
    *("ZeRO-1 2 x 12", "ZeRO-2 3 x 1 x 8 accumulation"),
)

# Ways to train. All clip the gradients; "clipped" changes nothing else.
HOW = ("clipped", "muon", "masked", "sampled", "experts", "experts by muon")
DATASETS = {"masked": MaskedDataset}
MICRO_BATCH, PARTS = 12, 5  # sequences, and --sampled_softmax, in "sampled"
# Numbers of experts. AdamW has more than a micro-batch uses. Muon would make the rounding errors of
# an expert with few tokens as large as the rest of its update. Queries and keys are normalised too.
EXPERTS = {"experts": 64, "experts by muon": 4}


class Reference(NamedTuple):
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]


@torch.no_grad()
def step_by_muon(
    matrix: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, rate: float
) -> None:
    """Take a step of Muon (https://kellerjordan.github.io/posts/muon/) with weight decay 0.1, and
    with rows (columns of a wide matrix) of equal norms."""
    momentum.mul_(0.95).add_(gradient, alpha=0.05)
    update = 0.05 * gradient + 0.95 * momentum
    rows, cols = matrix.shape
    x = update.T if rows >= cols else update
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x * (x.norm() / x.shape[1] ** 0.5 / x.norm(dim=0))
    x = x.T if rows >= cols else x
    matrix -= rate * 0.1 * matrix + rate * max(1, rows / cols) ** 0.5 * x


def plain_pytorch(data: Path, how: str) -> Reference:
    """Train in one process with whole global batches, without code of `lm/training/`."""
    train_set = DATASETS.get(how, PackedDataset)(data, "train", SEQ_LEN)
    experts = EXPERTS.get(how)
    torch.manual_seed(SEED)
    model = Transformer(
        LMConfig(
            dim=32,
            n_layers=2,
            n_heads=4,
            max_seq_len=SEQ_LEN,
            vocab_size=train_set.vocab_size,
            **{"use_moe": True, "n_routed_experts": experts, "qk_norm": True} if experts else {},
        )
    )
    blocks = [p for p in model.layers.parameters() if p.dim() > 1] if how.endswith("muon") else []
    momenta = {p: torch.zeros_like(p) for p in blocks}
    matrices = [p for p in model.parameters() if p.dim() > 1 and p not in momenta]
    scales = [p for p in model.parameters() if p.dim() == 1]
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
        out = model(tokens)
        if how == "sampled":
            halves = zip(out.logits.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True)
            losses_of = [
                loss_of_sampled_pieces(x.flatten(0, 1), y.flatten(), PARTS) for x, y in halves
            ]
            loss = sum(losses_of) / len(losses_of)
        else:
            loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
        balance = 0.0
        if experts:
            shares = F.one_hot(out.routing.argmax(-1), experts).float().mean(dim=2)
            balance = 0.1 * experts * (shares * out.routing.mean(dim=2)).sum(-1).mean()
        (loss + balance).backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        for p in model.parameters():
            p.grad *= CLIPPED / norm
        for group in optimizer.param_groups:
            group["lr"] = PEAK * rate
        optimizer.step()
        for p, momentum in momenta.items():
            gradients = p.grad.view(-1, *p.shape[-2:])  # of one matrix, or of one of each expert
            parts = (x.view_as(gradients) for x in (p.data, momentum))
            for gradient, matrix, of_matrix in zip(gradients, *parts, strict=True):
                step_by_muon(matrix, gradient, of_matrix, MUON_PEAK * rate)
        model.zero_grad()
        losses.append(loss.item())
        grad_norms.append(norm.item())
    parameters = dict(model.named_parameters())
    moments = {
        f"{name}.{key}": optimizer.state[p][key]
        for name, p in parameters.items()
        if p not in momenta
        for key in ("exp_avg", "exp_avg_sq")
    } | {f"{name}.momentum_buffer": momenta[p] for name, p in parameters.items() if p in momenta}
    return Reference(losses, grad_norms, {n: p.detach() for n, p in parameters.items()}, moments)


@pytest.fixture(scope="module")
def by_hand(packed) -> dict[str, Reference]:
    return {how: plain_pytorch(packed, how) for how in HOW}


def start(how: str, name: str, packed: Path, path: Path, more: str = "") -> Trained:
    """Train in the way `how` with the engine, processes and micro-batches of SPLITS[name]."""
    engine, processes, batch_size, accumulation_steps = SPLITS[name]
    if engine == "round robin":
        engine = deepspeed_file(path.parent / "ds.json", round_robin_gradients=True)
    flags = (
        f"--batch_size {batch_size} --accumulation_steps {accumulation_steps} "
        f"--grad_clip {CLIPPED} --max_steps {STEPS} --learning_rate {PEAK} "
        f"--warmup_steps {WARMUP} --seed {SEED} --dtype float32 --save_interval 3{more}"
    )
    if how.endswith("muon"):
        flags += f" --optimizer muon --muon_learning_rate {MUON_PEAK}"
    if how == "sampled":
        flags += f" --sampled_softmax {PARTS}"
    if how in EXPERTS:
        flags += f" --use_moe --n_routed_experts {EXPERTS[how]} --qk_norm"
    if how == "masked":
        program = ["-m", "tests.integration.masked_pretraining"]
        engine = [*launch_command(engine, processes)[:-1], *program]
    return train(engine, processes, packed, path, flags)


@pytest.fixture(scope="module")
def runs(packed, tmp_path_factory):
    """Returns the run of `how` and `name`. Only the first call launches it."""
    out_dir = tmp_path_factory.mktemp("runs")
    return cache(lambda how, name: start(how, name, packed, out_dir / f"{how} {name}"))


def largest_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def relative(moments: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict:
    """Divide each tensor by the largest absolute value of its reference: "exp_avg_sq" is tiny."""
    return {name: value / reference[name].abs().max() for name, value in moments.items()}


def assert_same_end(run: Trained, reference: Reference) -> None:
    assert largest_difference(run.tensors(), reference.weights) <= TOLERANCE
    by_hand = reference.moments
    moments = relative(run.tensors("optimizer"), by_hand)
    assert largest_difference(moments, relative(by_hand, by_hand)) <= 10 * TOLERANCE


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *(("clipped", name) for name in (PLAIN, ZERO_2, "ZeRO-3 2 x 12")),
        *(("sampled", name) for name in ("plain 1 x 12 x 2 accumulation", "ZeRO-2 2 x 12")),
        ("sampled", "ZeRO-3 2 x 12"),
        *(("muon", PLAIN), ("muon", ZERO_2)),
        *(("muon", DDP), ("masked", ACCUMULATED), ("masked", ZERO_2), ("experts by muon", ZERO_2)),
        *(("experts", name) for name in (ACCUMULATED, DDP, ZERO_1, ZERO_2, "ZeRO-3 2 x 12")),
    ],
)
def test_every_engine_trains_as_plain_pytorch_does(how, name, runs, by_hand):
    run, reference = runs(how, name), by_hand[how]
    tolerance = TOLERANCE / 10 if how == "masked" else TOLERANCE
    assert run.column("loss") == pytest.approx(reference.losses, abs=tolerance)
    assert run.column("grad_norm") == pytest.approx(reference.grad_norms, abs=tolerance)
    assert_same_end(run, reference)


def test_experts_that_get_no_token_in_any_step_are_only_decayed(runs, by_hand):
    run = runs("experts", DDP)
    assert run.column("idlest_expert") == [0.0] * STEPS
    assert all(1 < value < 64 for value in run.column("balancing_loss"))
    moments = run.tensors("optimizer")["layers.1.feed_forward.w1.exp_avg_sq"]
    busy = moments.flatten(1).any(dim=1)
    assert 0 < busy.sum() < 64
    weights = run.tensors()["layers.1.feed_forward.w1"]
    reference = by_hand["experts"].weights["layers.1.feed_forward.w1"]
    torch.testing.assert_close(weights[~busy], reference[~busy], atol=1e-7, rtol=0)


def test_zero_2_reduces_each_gradient_once_per_step(runs, packed, tmp_path):
    run = runs("masked", ZERO_2)
    assert "engine: DeepSpeed ZeRO-2, one reduction per step" in run.out
    n = sum(tensor.numel() for tensor in run.tensors().values())
    (reduced,) = set(map(int, re.findall(r"reduced (\d+) elements", run.out)))
    assert STEPS * n <= reduced < 1.01 * STEPS * n
    each = start("masked", ZERO_2, packed, tmp_path / "run", " --no-coalesce_reduction")
    assert each.column("loss") == pytest.approx(run.column("loss"), abs=TOLERANCE / 10)
    assert f"reduced {reduced + 7 * STEPS * n} elements" in each.out  # 8 reductions per step


def test_clipping_muon_sampling_and_masking_have_an_effect(by_hand, packed):
    """If they had no effect, the other tests of this file would prove less."""
    pairs = zip(by_hand["sampled"].losses, by_hand["clipped"].losses, strict=True)
    differences = [abs(sampled - whole) for sampled, whole in pairs]
    assert max(differences) > 10 * TOLERANCE, differences
    clipped, muon = (by_hand[how] for how in ("clipped", "muon"))
    assert min(*clipped.grad_norms, *muon.grad_norms) > 2 * CLIPPED
    assert muon.losses[-1] < clipped.losses[-1] - 0.02
    train_set = MaskedDataset(packed, "train", SEQ_LEN)
    batches = iter(MicroBatchSampler(len(train_set), 3, seed=SEED))  # of all ranks, as in "masked"
    counts = {
        sum(int((train_set[i][1] != IGNORE_INDEX).sum()) for i in next(batches))
        for _ in range(STEPS * 8)
    }
    assert 0 in counts
    assert len(counts) > 5


def test_momenta_of_muon_are_divided_anew_under_another_engine(runs, by_hand, packed, tmp_path):
    """AdamW's moments: test_engines.py."""
    path = runs("muon", PLAIN).stopped_after(6, tmp_path / "stopped")
    resumed = start("muon", "round robin", packed, path, f" --resume {path}")
    assert resumed.column("loss") == pytest.approx(by_hand["muon"].losses, abs=TOLERANCE)
    assert_same_end(resumed, by_hand["muon"])


@pytest.mark.parametrize(
    ("how", "name", "what"),
    [
        ("clipped", PLAIN, "selective"),
        ("clipped", "ZeRO-3 2 x 12", "blocks"),
        ("experts", ZERO_2, "blocks"),
    ],
)
def test_a_resume_with_recomputation_is_equal_to_the_bit(how, name, what, runs, packed, tmp_path):
    whole = runs(how, name)
    path = whole.stopped_after(6, tmp_path / "stopped")
    more = f" --gradient_checkpointing {what} --resume {path}"
    resumed = start(how, name, packed, path, more)
    assert resumed.column("loss") == whole.column("loss")
    assert resumed.ends_as(whole)
