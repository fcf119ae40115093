"""The same global batch gives the same run, whoever computes it: as plain PyTorch does."""

import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import Trained, deepspeed_command, deepspeed_file, launch_command, train
from masked_pretraining import MaskedDataset
from torch.nn import functional as F

from data.dataset import PackedDataset
from data.order import MicroBatchSampler
from formats.portable import load_portable
from model import IGNORE_INDEX, LMConfig, Transformer

pytestmark = pytest.mark.slow

STEPS, GLOBAL_BATCH, SEQ_LEN, SEED = 6, 8, 32, 7
PEAK, WARMUP = 1e-3, 2
TOLERANCE = 1e-4
# engine, processes, batch_size, accumulation_steps: a global batch of 8 each
SHARED_OUT = {
    "plain 8": ("plain", 1, 8, 1),
    "plain 2 x 4 accumulation": ("plain", 1, 2, 4),
    "DDP 2 x 4": ("ddp", 2, 4, 1),
    "DDP 2 x 2 x 2 accumulation": ("ddp", 2, 2, 2),
    "ZeRO-2 1 x 8": ("zero2", 1, 8, 1),
    "ZeRO-2 2 x 4": ("zero2", 2, 4, 1),
    "ZeRO-2 2 x 2 x 2 accumulation": ("zero2", 2, 2, 2),
}
DDP, ZERO_2 = "DDP 2 x 2 x 2 accumulation", "ZeRO-2 2 x 2 x 2 accumulation"
CLIPPED, UNCLIPPED = 0.1, 0.0
MUON_PEAK, MUON = 0.02, " --optimizer muon"
SHARED_OUT_BY_MUON = {
    "plain 8": ("plain", 1, 8, 1),
    "DDP 2 x 2 x 2 accumulation": ("ddp", 2, 2, 2),
    "ZeRO-1 2 x 4": ("zero1", 2, 4, 1),
    "ZeRO-2 1 x 8": ("zero2", 1, 8, 1),
    "ZeRO-2 2 x 2 x 2 accumulation": ("zero2", 2, 2, 2),
}


@dataclass
class Reference:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]


@torch.no_grad()
def step_by_muon(matrix: torch.nn.Parameter, momentum: torch.Tensor, rate: float) -> None:
    """By hand, from https://kellerjordan.github.io/posts/muon/."""
    momentum.mul_(0.95).add_(matrix.grad, alpha=0.05)
    update = 0.05 * matrix.grad + 0.95 * momentum
    rows, cols = matrix.shape
    x = update.T if rows > cols else update
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.T if rows > cols else x
    matrix -= rate * 0.1 * matrix + rate * max(1, rows / cols) ** 0.5 * x


def plain_pytorch(
    data: Path, grad_clip: float, muon: bool = False, dataset: type = PackedDataset
) -> Reference:
    """Training by hand: one process, one batch, nothing of `training/`."""
    train_set = dataset(data, "train", SEQ_LEN)
    torch.manual_seed(SEED)
    model = Transformer(
        LMConfig(
            dim=32, n_layers=2, n_heads=4, max_seq_len=SEQ_LEN, vocab_size=train_set.vocab_size
        )
    )
    blocks = [p for p in model.layers.parameters() if p.dim() == 2] if muon else []
    momenta = {p: torch.zeros_like(p) for p in blocks}
    matrices = [p for p in model.parameters() if p.dim() == 2 and p not in momenta]
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
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        if grad_clip and norm > grad_clip:
            for p in model.parameters():
                p.grad *= grad_clip / norm
        for group in optimizer.param_groups:
            group["lr"] = PEAK * rate
        optimizer.step()
        for p, momentum in momenta.items():
            step_by_muon(p, momentum, MUON_PEAK * rate)
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
def reference(packed):
    """The same by hand, for each clipping."""
    return {grad_clip: plain_pytorch(packed, grad_clip) for grad_clip in (CLIPPED, UNCLIPPED)}


@pytest.fixture(scope="module")
def muon_reference(packed):
    return plain_pytorch(packed, CLIPPED, muon=True)


def flags(batch_size: int, accumulation_steps: int, grad_clip: float) -> str:
    return (
        f"--batch_size {batch_size} --accumulation_steps {accumulation_steps} "
        f"--grad_clip {grad_clip} --max_steps {STEPS} --learning_rate {PEAK} "
        f"--warmup_steps {WARMUP} --seed {SEED} --dtype float32 --save_interval 3"
    )


@pytest.fixture(scope="module")
def runs(packed, tmp_path_factory):
    """Runs, each of them launched once, when it is first asked for."""
    out_dir, done = tmp_path_factory.mktemp("runs"), {}

    def get(name: str, grad_clip: float, more: str = "") -> Trained:
        key = name, grad_clip, more
        if key not in done:
            engine, processes, *sizes = (SHARED_OUT | SHARED_OUT_BY_MUON | ZERO_3)[name]
            path = out_dir / f"run-{len(done)}"
            done[key] = train(engine, processes, packed, path, flags(*sizes, grad_clip) + more)
        return done[key]

    return get


def largest_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def relative(moments: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict:
    """In units of the largest one of each tensor: squares of gradients are tiny numbers."""
    return {name: value / reference[name].abs().max() for name, value in moments.items()}


def assert_same_end(run: Trained, reference: Reference) -> None:
    assert largest_difference(run.tensors(), reference.weights) <= TOLERANCE
    by_hand = reference.moments
    moments = relative(run.tensors("optimizer"), by_hand)
    assert largest_difference(moments, relative(by_hand, by_hand)) <= 10 * TOLERANCE


def but_for(variants: tuple[str, ...], names: Iterable[str]) -> list:
    """Parameters for a test, those marked that differ from another one in little."""
    marks = dict.fromkeys(variants, pytest.mark.variant)
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


CASES = [
    *((name, CLIPPED) for name in SHARED_OUT),
    *(
        pytest.param(name, UNCLIPPED, marks=() if name == "plain 8" else pytest.mark.variant)
        for name in SHARED_OUT
    ),
]


@pytest.mark.parametrize(("name", "grad_clip"), CASES)
def test_every_engine_trains_as_plain_pytorch_does(name, grad_clip, runs, reference):
    run, by_hand = runs(name, grad_clip), reference[grad_clip]
    assert run.column("loss") == pytest.approx(by_hand.losses, abs=TOLERANCE)
    assert run.column("grad_norm") == pytest.approx(by_hand.grad_norms, abs=TOLERANCE)
    assert_same_end(run, by_hand)


def test_the_clipping_that_was_tested_does_clip(reference):
    clipped, unclipped = reference[CLIPPED], reference[UNCLIPPED]
    assert min(clipped.grad_norms) > 2 * CLIPPED
    # AdamW divides by the size of gradients, so it shows in the moments rather than in weights.
    moments = [relative(r.moments, unclipped.moments) for r in (clipped, unclipped)]
    assert largest_difference(*moments) > 0.5


def test_validation_does_not_depend_on_who_shares_it(runs):
    """Its samples are an odd number, so that one of two processes has fewer."""
    results = [runs(name, CLIPPED).rows("val_loss")[-1] for name in SHARED_OUT]
    assert {row["val_samples"] for row in results} == {results[0]["val_samples"]}
    assert results[0]["val_samples"] % 2 == 1
    expected = pytest.approx(results[0]["val_loss"], abs=TOLERANCE)
    assert [row["val_loss"] for row in results] == [expected] * len(results)


def moved(checkpoint: Path, to: Path) -> str:
    """A run that has nothing but this checkpoint; the flag that resumes it."""
    shutil.copytree(checkpoint, to / "checkpoints" / checkpoint.name)
    return f" --resume {to}"


@pytest.mark.parametrize(
    ("before", "after"), [("ZeRO-2 2 x 4", "plain 8"), ("plain 8", "ZeRO-2 2 x 2 x 2 accumulation")]
)
def test_a_checkpoint_goes_on_with_another_engine_and_number_of_processes(
    before, after, runs, reference, packed, tmp_path
):
    resume = moved(runs(before, CLIPPED).checkpoint(3), tmp_path / "moved")
    engine, processes, *sizes = SHARED_OUT[after]
    here = flags(*sizes, CLIPPED) + resume
    resumed = train(engine, processes, packed, tmp_path / "moved", here)
    assert resumed.column("step") == [4, 5, 6]
    assert resumed.column("loss") == pytest.approx(reference[CLIPPED].losses[3:], abs=TOLERANCE)
    assert_same_end(resumed, reference[CLIPPED])


@pytest.mark.parametrize("name", but_for((DDP, "ZeRO-1 2 x 4"), SHARED_OUT_BY_MUON))
def test_every_engine_trains_by_muon_as_plain_pytorch_does(name, runs, muon_reference):
    run = runs(name, CLIPPED, MUON)
    assert "optimizer: Muon on 14 matrices (0.03 million parameters)" in run.out
    assert run.column("loss") == pytest.approx(muon_reference.losses, abs=TOLERANCE)
    assert run.column("grad_norm") == pytest.approx(muon_reference.grad_norms, abs=TOLERANCE)
    assert_same_end(run, muon_reference)


def test_muon_was_at_work(muon_reference, reference):
    assert muon_reference.losses[-1] < reference[CLIPPED].losses[-1] - 0.02
    assert min(muon_reference.grad_norms) > 2 * CLIPPED


@pytest.mark.parametrize(
    "name", but_for((DDP, "ZeRO-1 2 x 4"), ("plain 8", DDP, "ZeRO-1 2 x 4", ZERO_2))
)
def test_muon_resumes_bit_for_bit(name, runs, packed, tmp_path):
    whole = runs(name, CLIPPED, MUON)
    resume = moved(whole.checkpoint(3), tmp_path / "moved")
    engine, processes, *sizes = SHARED_OUT_BY_MUON[name]
    here = flags(*sizes, CLIPPED) + MUON + resume
    resumed = train(engine, processes, packed, tmp_path / "moved", here)
    assert resumed.column("loss") == whole.column("loss")[3:]
    for file in ("weights", "optimizer"):
        assert largest_difference(resumed.tensors(file), whole.tensors(file)) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [("ZeRO-2 2 x 2 x 2 accumulation", "plain 8"), ("plain 8", "ZeRO-2 in another order")],
)
def test_muons_checkpoint_goes_on_with_another_engine_and_number_of_processes(
    before, after, runs, muon_reference, packed, tmp_path
):
    """DeepSpeed's "round_robin_gradients" deals out the parameters in another order."""
    resume = moved(runs(before, CLIPPED, MUON).checkpoint(3), tmp_path / "moved")
    if after == "plain 8":
        command, processes, batch_size = "plain", 1, 8
    else:
        config = deepspeed_file(tmp_path / "ds.json", round_robin_gradients=True)
        command, processes, batch_size = deepspeed_command(config, 2), 2, 4
    here = flags(batch_size, 1, CLIPPED) + MUON + resume
    resumed = train(command, processes, packed, tmp_path / "moved", here)
    assert resumed.column("loss") == pytest.approx(muon_reference.losses[3:], abs=TOLERANCE)
    assert_same_end(resumed, muon_reference)


ZERO_3 = {"ZeRO-3 2 x 4": ("configs/zero3.yaml", 2, 4, 1)}
RECOMPUTED = {
    "plain 8": "selective",
    "DDP 2 x 2 x 2 accumulation": "blocks",
    "ZeRO-2 2 x 2 x 2 accumulation": "selective",
    "ZeRO-3 2 x 4": "blocks",
}


@pytest.mark.parametrize("name", but_for((DDP, ZERO_2), RECOMPUTED))
def test_recomputing_goes_on_with_a_run_that_did_not_bit_for_bit(name, runs, packed, tmp_path):
    whole = runs(name, CLIPPED)
    resume = moved(whole.checkpoint(3), tmp_path / "moved")
    engine, processes, *sizes = (SHARED_OUT | ZERO_3)[name]
    here = f"{flags(*sizes, CLIPPED)}{resume} --gradient_checkpointing {RECOMPUTED[name]}"
    resumed = train(engine, processes, packed, tmp_path / "moved", here)
    assert "recomputed: blocks" in resumed.out
    assert resumed.column("loss") == whole.column("loss")[3:]
    for file in ("weights", "optimizer"):
        assert largest_difference(resumed.tensors(file), whole.tensors(file)) == 0


MASKED = {
    "plain 8": ("plain", 1, 8, 1),
    "plain 2 x 4 accumulation": ("plain", 1, 2, 4),
    "DDP 2 x 2 x 2 accumulation": ("ddp", 2, 2, 2),
    "ZeRO-2 2 x 2 x 2 accumulation": ("zero2", 2, 2, 2),
}


@pytest.fixture(scope="module")
def masked_reference(packed):
    return plain_pytorch(packed, CLIPPED, dataset=MaskedDataset)


@pytest.mark.parametrize("name", but_for(("plain 8", DDP), MASKED))
def test_every_target_that_counts_weighs_the_same(name, packed, masked_reference, tmp_path):
    """In losses and gradients, wherever its micro-batch is, and however many others count there."""
    engine, processes, *sizes = MASKED[name]
    program = ["-m", "tests.integration.masked_pretraining"]
    command = [*launch_command(engine, processes)[:-1], *program]
    run = train(command, processes, packed, tmp_path / "run", flags(*sizes, CLIPPED))
    assert run.column("loss") == pytest.approx(masked_reference.losses, abs=1e-5)
    assert run.column("grad_norm") == pytest.approx(masked_reference.grad_norms, abs=1e-5)
    assert_same_end(run, masked_reference)
    # Without the weights, means of micro-batches would be averaged.
    (val,) = run.rows("val_loss")
    assert val["val_loss"] == pytest.approx(validated_by_hand(run, packed), abs=1e-5)


def validated_by_hand(run: Trained, data: Path) -> float:
    """The mean over all targets that count, of the model that the run has left."""
    model, val_set = load_portable(run.path / "weights"), MaskedDataset(data, "val", SEQ_LEN)
    with torch.no_grad():
        samples = [val_set[i] for i in range(len(val_set))]
        tokens, targets = (torch.stack(part) for part in zip(*samples, strict=True))
        return model(tokens, targets).loss.item()


def test_some_micro_batches_had_no_target_at_all(packed):
    """Otherwise less would have been proven."""
    train_set = MaskedDataset(packed, "train", SEQ_LEN)
    batches = iter(MicroBatchSampler(len(train_set), 2, seed=SEED))
    counts = [
        sum(int((train_set[i][1] != IGNORE_INDEX).sum()) for i in next(batches))
        for _ in range(STEPS * 4)
    ]
    assert 0 in counts
    assert len(set(counts)) > 5
