"""Size and SHA-256 of every file of a folder, by which it is known again whether they are as they
were written."""

import hashlib
from pathlib import Path

from formats.portable import read_json, write_json

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> int:
    """Of all files in it, read back; returns their size in bytes."""
    files = {
        file.name: {"size": file.stat().st_size, "sha256": sha256_of(file)}
        for file in sorted(folder.iterdir())
    }
    write_json(folder / MANIFEST, {"files": files})
    return sum(file["size"] for file in files.values())


def damage_of_files(folder: Path, names: set[str]) -> str | None:
    """What is wrong with these files, which must be all; None if nothing is. Raises ConfigError,
    KeyError, TypeError, AttributeError, OSError: they or the manifest cannot be read."""
    files = read_json(folder / MANIFEST)["files"]
    if files.keys() != names:
        return f"the manifest names {', '.join(sorted(files))}"
    for name, expected in files.items():
        size = (folder / name).stat().st_size
        if size != expected["size"]:
            return f"{name} is {size} bytes long instead of {expected['size']}"
        if sha256_of(folder / name) != expected["sha256"]:
            return f"the checksum of {name} is wrong"
    return None


def sha256_of(path: Path) -> str:
    """Raises OSError: it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
