"""Writes a drawing as PNG, with lines and an alphabet of strokes, so that no library is needed. It knows no charts."""

from __future__ import annotations

import itertools
import struct
import zlib

from octavo.planner.chart import Drawing, Line

SCALE = 2  # pixels for one unit of the drawing
_DASH = 10

# Strokes of a character on a grid of 4 x 6, as pairs of column and row from the top left; a space lifts the pen.
# Letters have one case: what is small in a text is drawn as a capital.
_STROKES = {
    "A": "062046 1434",
    "B": "00063645443303 0030414233",
    "C": "4130100105163645",
    "D": "00062644422000",
    "E": "40000646 0333",
    "F": "400006 0333",
    "G": "41301001051636454323",
    "H": "0006 4046 0343",
    "I": "1030 2026 1636",
    "J": "4045361605",
    "K": "0006 4003 0346",
    "L": "000646",
    "M": "0600234046",
    "N": "06004640",
    "O": "100105163645413010",
    "P": "06003041423303",
    "Q": "100105163645413010 2446",
    "R": "06003041423303 2346",
    "S": "413010010213334445361605",
    "T": "0040 2026",
    "U": "000516364540",
    "V": "002640",
    "W": "0016233640",
    "X": "0046 4006",
    "Y": "0023 4023 2326",
    "Z": "00400646",
    "0": "100105163645413010 0541",
    "1": "112026 1636",
    "2": "01103041420646",
    "3": "011030414233234445361605",
    "4": "36300444",
    "5": "400003334445361605",
    "6": "413010010516364544331304",
    "7": "004016",
    "8": "103041423313020110 133344453616050413",
    "9": "0516364541301001021342",
    ".": "1626",
    ",": "2617",
    "-": "0343",
    "+": "0343 2125",
    "/": "0640",
    ":": "2122 2425",
    ";": "2122 2417",
    "=": "0242 0444",
    "(": "30212536",
    ")": "10212516",
    "%": "0640 0011 3546",
    "'": "2021",
    "_": "0646",
    "*": "1135 3115",
}


def as_png(drawing: Drawing) -> bytes:
    """8-bit RGB on white."""
    canvas = _Canvas(drawing.width * SCALE, drawing.height * SCALE)
    for part in drawing.parts:
        if isinstance(part, Line):
            canvas.line(part.start, part.end, _colour(part.colour), part.width, dashed=part.is_dashed)
        else:
            size = part.size / 9
            advance = 5.4 * size
            width = advance * len(part.text)
            left = part.at[0] - {"start": 0.0, "middle": width / 2, "end": width}[part.anchor]
            for index, character in enumerate(part.text.upper()):
                canvas.strokes(character, (left + index * advance, part.at[1]), size, _colour(part.colour))
    return canvas.encoded()


def _colour(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("#"))


class _Canvas:
    """Pixels, three bytes each."""

    def __init__(self, width: int, height: int) -> None:
        self._width = width
        self._height = height
        self._pixels = bytearray(b"\xff" * (3 * width * height))

    def line(
        self, start: tuple[float, float], end: tuple[float, float], colour: bytes, width: float, *, dashed: bool
    ) -> None:
        (x1, y1), (x2, y2) = ((x * SCALE, y * SCALE) for x, y in (start, end))
        steps = int(max(abs(x2 - x1), abs(y2 - y1))) + 1
        thick = max(1, round(width * SCALE / 2))
        for step in range(steps + 1):
            if dashed and step // (_DASH * SCALE // 2) % 2:
                continue
            x, y = round(x1 + (x2 - x1) * step / steps), round(y1 + (y2 - y1) * step / steps)
            for right in range(thick):
                for down in range(thick):
                    self._dot(x + right, y + down, colour)

    def strokes(self, character: str, at: tuple[float, float], size: float, colour: bytes) -> None:
        """A character whose baseline starts at `at`; one that has no strokes is left out."""
        for stroke in _STROKES.get(character, "").split():
            pairs = [(int(stroke[index]), int(stroke[index + 1])) for index in range(0, len(stroke) - 1, 2)]
            placed = [(at[0] + x * size, at[1] + (y - 6) * size) for x, y in pairs]
            for one, other in itertools.pairwise(placed):
                self.line(one, other, colour, 1.0, dashed=False)

    def _dot(self, x: int, y: int, colour: bytes) -> None:
        if 0 <= x < self._width and 0 <= y < self._height:
            start = 3 * (y * self._width + x)
            self._pixels[start : start + 3] = colour

    def encoded(self) -> bytes:
        row = 3 * self._width
        rows = b"".join(b"\0" + self._pixels[start : start + row] for start in range(0, len(self._pixels), row))
        header = struct.pack(">IIBBBBB", self._width, self._height, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
