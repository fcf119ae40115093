"""The table of flags in README.md: `python tests/flag_table.py` prints it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model.config import LMConfig
from training.arguments import TrainingArguments, flags_of, show_default


def flag_table() -> str:
    """All flags as Markdown, one table per group."""
    lines, last = [], None
    for item, title in [*flags_of(TrainingArguments), *flags_of(LMConfig)]:
        if title != last:
            head = ["| flag | default | meaning |", "|---|---|---|"]
            lines += ["", f"**{title.capitalize()}**", "", *head]
            last = title
        meaning = item.metadata["help"]
        if choices := item.metadata.get("choices"):
            meaning += f": {', '.join(choices)}"
        default = "" if item.default is None else f"`{show_default(item.default)}`"
        lines.append(f"| `--{item.name}` | {default} | {meaning} |")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    print(flag_table())
