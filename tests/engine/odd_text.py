"""Text that tokenizers get wrong: odd Unicode, runs of spaces and digits, special tokens written out."""

from __future__ import annotations

import random

# First and last code point of ranges that tokenizers treat differently.
RANGES = (
    (0x20, 0x7E),
    (0x00, 0x1F),
    (0x80, 0xFF),
    (0x300, 0x36F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x590, 0x5FF),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE7F),
    (0x1100, 0x11FF),
    (0x2000, 0x206F),
    (0x2150, 0x218B),
    (0x2200, 0x22FF),
    (0x2581, 0x2583),
    (0x3000, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xE000, 0xE0FF),
    (0xFE00, 0xFE0F),
    (0xFF00, 0xFFEF),
    (0x1D400, 0x1D7FF),
    (0x1F1E6, 0x1F1FF),
    (0x1F300, 0x1FAFF),
    (0x20000, 0x200FF),
    (0xE0000, 0xE007F),
    (0x10FF00, 0x10FFFF),
)
BETWEEN = ("", "", " ", "  ", "   ", "\n", "\r\n", "\n\n\n", "\t", "12", "3.14", "'s", "'LL")

HAND_WRITTEN = (
    "",
    " ",
    "   ",
    "\n",
    "Hello, world!",
    "  two spaces before, two after  ",
    "It's 2026; they've paid 1234567 kr. for 3.14 pies.",
    "Steps:\n\n1. First\n\n2. Second\n   3) nested\t4",
    "def f(x):\n    if x:\n\treturn x ** 2  # комментарий\r\n",
    "Größe, naïve café, Ærøskøbing, İstanbul ıI",
    "cafe\u0301 composed: caf\u00e9, \u1e9b\u0323 \u212b",
    "Привет, как дела? Ёлка 42",
    "你好,世界!今天是2026年11月29日。",
    "日本語のテキスト、カタカナとひらがな。",
    "안녕하세요 세계",
    "مرحبا بالعالم ١٢٣",
    "שלום עולם",
    "नमस्ते दुनिया १२३",
    "สวัสดีชาวโลก",
    "👍🏽 👩‍👩‍👧‍👦 🇳🇴🇩🇰 🏳️‍🌈 e\u0301\u0302\u0303",
    "𝒳𝓎𝔃 𝟙𝟚𝟛 ⅷ ½ ² ³ ①",
    "zero\u200bwidth\u200d joiner \ufeffBOM \u2028line\u2029para\u00a0nbsp\u3000wide",
    "\x00\x01\x07\x1b[31m",
    "a" * 300,
    "=" * 80,
    "\u2581already marked\u2581\u2581text",
    "<|im_start|>user\nhi<|im_end|>",
    "<s>[INST] hi [/INST]</s>",
    "don't DON'T we'LL I'M x'Re",
    "https://example.org/a?b=c&d=%20#e",
)


def odd_lines(seed: int = 7, count: int = 200) -> list[str]:
    """Random characters of mixed kinds, with runs of spaces, digits and line ends between them."""
    chance = random.Random(seed)
    lines = []
    for _ in range(count):
        pieces: list[str] = []
        for _ in range(chance.randint(1, 12)):
            low, high = chance.choice(RANGES)
            pieces.append("".join(chr(chance.randint(low, high)) for _ in range(chance.randint(1, 6))))
            pieces.append(chance.choice(BETWEEN))
        lines.append("".join(pieces))
    return lines
