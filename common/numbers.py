"""Numbers and tables in words for people."""


def counted(n: int, plural: str) -> str:
    """Count things: 1 layer, 2 layers, 1 process, 1,024 processes."""
    one = plural.removesuffix("es" if plural.endswith("sses") else "s")
    return f"{n:,} {one if n == 1 else plural}"


def size(n_bytes: float) -> str:
    """Write a size: 3.4 GB, 12.1 MB, and kB below 0.1 MB."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.1f} GB"
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:.1f} kB"


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
