"""What scripts.evaluate says: a block for people, a JSON file for programs."""

import json
from pathlib import Path

from common.numbers import counted
from evaluation.intervals import LEAST_UNITS, Estimate

NAMES = {  # of metrics: for people, with the format of their numbers
    "loss": ("loss", ".4f", "nats per token"),
    "perplexity": ("perplexity", ".2f", ""),
    "bits_per_byte": ("bits per byte", ".4f", ""),
    "accuracy": ("accuracy", ".2%", "of next tokens are the likeliest one"),
    "acc": ("acc", ".2%", "by log-likelihood of the choice"),
    "acc_norm": ("acc_norm", ".2%", "by log-likelihood per byte of it"),
    "chance": ("chance", ".2%", "what guessing gives"),
}


def report(result: dict) -> str:
    """The block for people."""
    run = f"{result['dtype']}, {result['processes']} × {result['device']}"
    if result.get("zero_stage"):
        run += f", weights divided by ZeRO-{result['zero_stage']}"
    rows = [
        ("model", f"{result['model']} ({result['parameters'] / 1e6:.2f} million parameters)"),
        ("data", _data(result)),
        ("run", run),
        *((NAMES[name][0], _show(name, value)) for name, value in result["metrics"].items()),
        ("interval", _interval(result)),
    ]
    if result.get("truncated"):
        lost = f"{counted(result['truncated'], 'questions')} over {result['max_seq_len']} tokens"
        rows.append(("truncated", f"{lost}, whose beginning was left out"))
    time = f"{result['seconds']:.1f} s"
    if "tokens" in result:
        time += f", {result['tokens_per_second']:,.0f} tokens/s"
    return "\n".join(f"{name:>13}: {text}" for name, text in [*rows, ("time", time)])


def _data(result: dict) -> str:
    data, seq_len = result["data"], result["max_seq_len"]
    if result["task"] == "choice":
        return f"{data}: {counted(result['units'], 'questions')}, delimiter {result['delimiter']!r}"
    counts = f"{result['tokens']:,} tokens, {result['bytes']:,} bytes"
    if result["task"] == "packed":
        split, n = result["split"], result["sequences"]
        return f"{data}, {split} split: {counts} in {n:,} sequences of {seq_len}"
    window = f"windows of {seq_len}, stride {result['stride']}"
    return f"{data}: {counts} in {counted(result['units'], 'documents')}, {window}"


def _interval(result: dict) -> str:
    if result["units"] < LEAST_UNITS and result["task"] != "choice":
        return f"none, for there are fewer than {LEAST_UNITS} {result['unit']}"
    return f"95%, by the spread among {counted(result['units'], result['unit'])}"


def _show(name: str, value: Estimate) -> str:
    _, form, meaning = NAMES[name]
    ends = ""
    if value.low is not None and name != "chance":
        ends = f"({value.low:{form}} to {value.high:{form}})"
    return "  ".join(part for part in (f"{value.value:{form}}", ends, meaning) if part)


def write_json(path: Path, result: dict) -> None:
    """All numbers and settings; each metric as {"value", "low", "high"}."""
    metrics = {name: value._asdict() for name, value in result["metrics"].items()}
    text = json.dumps(result | {"metrics": metrics}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
