"""Charts as SVG and PNG: what they show, and that both are well-formed."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.planner.chart import Chart, Line, Series, draw
from octavo.planner.plan import Plan, PlanRequest, make_plan
from octavo.planner.plots import charts, write_plot
from octavo.planner.png import SCALE, as_png
from octavo.planner.sources import Numbers, geometry_of_numbers, open_geometry
from octavo.replay.hardware import find_hardware

SVG = "{http://www.w3.org/2000/svg}"


def planned(**asked: object) -> Plan:
    return make_plan(open_geometry("llama-2-7b"), PlanRequest(**asked))  # type: ignore[arg-type]


def test_svg_shows_batches_weights_and_memory(tmp_path: Path) -> None:
    write_plot(planned(memory_bytes=24 * 10**9, batch=3), tmp_path / "p.svg")
    root = ElementTree.fromstring((tmp_path / "p.svg").read_text())
    words = [each.text for each in root.iter(f"{SVG}text")]
    for name in ("batch 1", "batch 3", "batch 64", "weights", "memory"):
        assert name in words
    assert root.find(f"{SVG}title") is not None


def test_a_device_adds_the_bound_of_throughput() -> None:
    found = charts(planned(hardware=find_hardware("A100-80GB"), memory_bytes=80 * 10**9))
    assert [len(chart.series) for chart in found] == [5, 1]


def test_plain_numbers_without_weights_have_a_chart(tmp_path: Path) -> None:
    plan = make_plan(geometry_of_numbers(Numbers(layers=2, kv_heads=2, head_dim=16)), PlanRequest())
    write_plot(plan, tmp_path / "p.svg")
    assert "weights" not in (tmp_path / "p.svg").read_text()


def test_png_has_its_size_and_every_colour(tmp_path: Path) -> None:
    write_plot(planned(), tmp_path / "p.png")
    data = (tmp_path / "p.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (640 * SCALE, 400 * SCALE)
    place, pixels = 8, b""
    while place < len(data):
        (length,), kind = struct.unpack(">I", data[place : place + 4]), data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0] == zlib.crc32(kind + body)
        pixels += body if kind == b"IDAT" else b""
        place += 12 + length
    rows = zlib.decompress(pixels)
    assert len(rows) == height * (1 + 3 * width)
    for colour in ("#1f6fb4", "#c8501e", "#2f8f4e", "#20262d"):
        assert bytes.fromhex(colour[1:]) in rows


def test_every_character_of_a_chart_has_strokes() -> None:
    from octavo.planner.png import _STROKES

    plan = planned(hardware=find_hardware("A100-80GB"), memory_bytes=80 * 10**9)
    text = "".join(part.text for part in draw(charts(plan)).parts if not isinstance(part, Line))
    assert set(text.upper()) - set(_STROKES) == {" "}


def test_axes_are_logarithmic() -> None:
    points = ((1.0, 10.0), (10.0, 100.0), (100.0, 1000.0))
    chart = Chart("t", "x", "y", (Series("s", points),), str, str)
    lines = [part for part in draw([chart]).parts if isinstance(part, Line) and part.colour == "#1f6fb4"][:2]
    (x1, y1), (x2, y2), (x3, y3) = lines[0].start, lines[0].end, lines[1].end
    assert x3 - x2 == pytest.approx(x2 - x1)
    assert y3 - y2 == pytest.approx(y2 - y1)
    assert as_png(draw([chart])).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["p.pdf", "p"])
def test_other_endings_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        write_plot(planned(), tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_plot(planned(), tmp_path / "absent" / "p.svg")
