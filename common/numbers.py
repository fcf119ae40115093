"""Numbers as people write them."""


def counted(n: int, plural: str) -> str:
    """1 layer, 2 layers, 1 process, 1,024 processes."""
    one = plural.removesuffix("es" if plural.endswith("sses") else "s")
    return f"{n:,} {one if n == 1 else plural}"


def size(n_bytes: float) -> str:
    """12.1 MB, or 3.4 kB where a tenth of an MB would say little, or 3.4 GB."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.1f} GB"
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:.1f} kB"
