"""A table for a terminal: columns as wide as they need."""


def columns(rows: list[dict[str, str]]) -> str:
    """Lay out rows, each of cells by the same column titles; the first column is left-aligned, the
    others are right-aligned."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
