"""Text for people about the result of an evaluation: a block for one model, a table for several."""

from common.numbers import columns, counted
from evaluation.intervals import LEAST_UNITS, Estimate

NAMES = {  # of metrics: for people, with the format of their numbers and an explanation
    "loss": ("loss", ".4f", "  nats per token"),
    "perplexity": ("perplexity", ".2f", ""),
    "bits_per_byte": ("bits per byte", ".4f", ""),
    "accuracy": ("accuracy", ".2%", "  of next tokens are the likeliest one"),
    "acc": ("acc", ".2%", "  by log-likelihood of the choice"),
    "acc_norm": ("acc_norm", ".2%", "  by log-likelihood per byte of it"),
    "chance": ("chance", ".2%", "  what guessing gives"),
}


def report(result: dict) -> str:
    """Return the block for one model."""
    run = f"{result['dtype']}, {result['processes']} × {result['device']}"
    if result["zero_stage"]:
        run += f", weights divided by ZeRO-{result['zero_stage']}"
    rows = {
        "model": f"{result['model']} ({result['parameters'] / 1e6:.2f} million parameters)",
        "data": f"{_place(result)}: {_amount(result)}",
        "run": run,
    }
    for key, value in result["metrics"].items():
        name, _, explanation = NAMES[key]
        rows[name] = f"{_number(key, value, '  ')}{explanation}"
    rows["interval"] = f"95%, by the spread among {counted(result['units'], result['unit'])}"
    if result["units"] < LEAST_UNITS and result["task"] != "choice":
        rows["interval"] = f"none, for there are fewer than {LEAST_UNITS} {result['unit']}"
    if result.get("truncated"):
        lost = f"{counted(result['truncated'], 'questions')} over {result['max_seq_len']} tokens"
        rows["truncated"] = f"{lost}, whose beginning was left out"
    if result.get("cut") or result.get("left_out"):
        cut = f"{result['cut']:,} cut after their last answer within the context"
        rows["long ones"] = f"{cut}, {result['left_out']:,} without one left out"
    rows["time"] = f"{result['seconds']:.1f} s"
    if "tokens" in result:
        rows["time"] += f", {result['tokens_per_second']:,.0f} tokens/s"
    return "\n".join(f"{name:>13}: {text}" for name, text in rows.items())


def compare(results: list[dict]) -> str:
    """Return a table of several models on the same data, one per line."""
    rows = [
        {"model": result["model"], "parameters": f"{result['parameters'] / 1e6:.2f} million"}
        | {NAMES[key][0]: _number(key, value, " ") for key, value in result["metrics"].items()}
        | {"of": _amount(result)}
        for result in results
    ]
    return f"{_place(results[0])}\n{columns(rows)}"


def _number(key: str, value: Estimate, between: str) -> str:
    """Format a metric with its interval; "chance" has none."""
    form = NAMES[key][1]
    if value.low is None or key == "chance":
        return f"{value.value:{form}}"
    return f"{value.value:{form}}{between}({value.low:{form}} to {value.high:{form}})"


def _place(result: dict) -> str:
    return result["data"] + (f", {result['split']} split" if result["split"] else "")


def _amount(result: dict) -> str:
    """Describe how much was scored, and how."""
    units, seq_len = counted(result["units"], result["unit"]), result["max_seq_len"]
    if result["task"] == "choice":
        how = "as turns" if result["template"] else f"delimiter {result['delimiter']!r}"
        return f"{units}, {how}"
    if result["task"] == "conversations":
        return f"{result['tokens']:,} tokens of answers in {units}"
    amount = f"{result['tokens']:,} tokens, {result['bytes']:,} bytes"
    if result["task"] == "packed":
        return f"{amount} in {result['sequences']:,} sequences of {seq_len}"
    return f"{amount} in {units}, windows of {seq_len}, stride {result['stride']}"
