"""What scripts.evaluate says: a block for people, a JSON file for programs."""

import json
from pathlib import Path

from common.columns import columns
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
    if result.get("cut") or result.get("left_out"):
        cut = f"{result['cut']:,} cut after their last answer within the context"
        rows.append(("long ones", f"{cut}, {result['left_out']:,} without one left out"))
    time = f"{result['seconds']:.1f} s"
    if "tokens" in result:
        time += f", {result['tokens_per_second']:,.0f} tokens/s"
    return "\n".join(f"{name:>13}: {text}" for name, text in [*rows, ("time", time)])


def compare(results: list[dict]) -> str:
    """Several models on the same data, one per line."""
    metrics = list(dict.fromkeys(name for result in results for name in result["metrics"]))
    rows = [
        {"model": result["model"], "parameters": f"{result['parameters'] / 1e6:.2f} million"}
        | {NAMES[name][0]: _number(name, result["metrics"][name]) for name in metrics}
        | {"of": _data(result).removeprefix(f"{result['data']}: ")}
        for result in results
    ]
    return f"{results[0]['data']}\n{columns(rows)}"


def _number(name: str, value: Estimate, between: str = " ") -> str:
    """With its interval."""
    form = NAMES[name][1]
    parts = [f"{value.value:{form}}"]
    if value.low is not None and name != "chance":
        parts.append(f"({value.low:{form}} to {value.high:{form}})")
    return between.join(parts)


def _data(result: dict) -> str:
    data, seq_len = result["data"], result["max_seq_len"]
    if result["task"] == "choice":
        how = "as turns" if result["template"] else f"delimiter {result['delimiter']!r}"
        return f"{data}: {counted(result['units'], 'questions')}, {how}"
    if result["task"] == "conversations":
        split = f", {result['split']} split" if result["split"] else ""
        said = (
            f"{result['tokens']:,} tokens of answers in {counted(result['units'], 'conversations')}"
        )
        return f"{data}{split}: {said}"
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
    meaning = NAMES[name][2]
    return "  ".join(part for part in (_number(name, value, "  "), meaning) if part)


def write_json(path: Path, results: list[dict]) -> None:
    """All numbers and settings; each metric as {"value", "low", "high"}. Of several models a
    list."""
    found = [
        result | {"metrics": {name: v._asdict() for name, v in result["metrics"].items()}}
        for result in results
    ]
    content = found if len(found) > 1 else found[0]
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
