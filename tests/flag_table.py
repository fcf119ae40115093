"""The tables of flags in docs/flags.md: `python tests/flag_table.py` prints them."""

import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lm.training.arguments import (
    DistillationArguments,
    SFTArguments,
    TrainingArguments,
    flags_of,
    show_default,
)
from model.config import LMConfig


def flag_table() -> str:
    """Return the flags of pretraining as Markdown, one table per group. The last tables list
    flags of fine-tuning and distillation that pretraining lacks, or has with another default."""
    known = {item.name: item.default for item in fields(TrainingArguments)}
    others = [
        (item, f"{group}, `{kind.program}`")
        for kind in (SFTArguments, DistillationArguments)
        for item, group in flags_of(kind)
        if item.name not in known or item.default != known[item.name]
    ]
    lines, last = [], None
    for item, title in [*flags_of(TrainingArguments), *flags_of(LMConfig), *others]:
        if title != last:
            head = ["| flag | default | meaning |", "|---|---|---|"]
            lines += ["", f"**{title[0].upper()}{title[1:]}**", "", *head]
            last = title
        meaning = item.metadata["help"]
        if choices := item.metadata.get("choices"):
            meaning += f": {', '.join(choices)}"
        shown = f"`{show_default(item.default)}`"
        default = "" if item.default in (None, "") else shown
        lines.append(f"| `--{item.name}` | {default} | {meaning} |")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    print(flag_table())
