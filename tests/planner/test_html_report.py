"""The HTML report: in a headless Chromium, by keyboard alone, at phone width, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.planner.cache_bytes import CacheBytes
from octavo.planner.comparisons import Comparisons
from octavo.planner.config_geometry import geometry_of
from octavo.planner.html_report import html_report, page_data
from octavo.planner.plan import DEVICE_SHARE, Plan, PlanRequest, make_plan
from octavo.planner.sources import open_geometry
from octavo.replay.hardware import find_hardware
from tests.planner.browser import Browser, find_chromium
from tests.planner.small_configs import CASES

PHONE = (360, 740)
SLIDERS = ("context", "batch", "format", "heads", "hardware")
HYBRIDS = ("gpt_oss", "qwen3_next", "deepseek_v3", "jamba")
needs_browser = pytest.mark.skipif(find_chromium() is None, reason="no Chromium (OCTAVO_TEST_CHROMIUM) is here")


def planned(name: str) -> Plan:
    if name in CASES:
        kind, config = CASES[name]
        return make_plan(geometry_of({"model_type": kind, **config}, name), PlanRequest(context=512))
    return make_plan(open_geometry(name), PlanRequest(hardware=find_hardware("A100-80GB"), memory_bytes=80 * 10**9))


def write(plan: Plan, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(html_report(plan, Comparisons(plan)), encoding="utf-8")
    return path


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = find_chromium()
    assert program is not None
    with Browser(program, tmp_path / "profile") as opened:
        yield opened
        assert opened.errors == []


def set_sliders(browser: Browser, **places: int) -> None:
    for name, place in places.items():
        browser.value(
            f"(() => {{ const s = document.getElementById('{name}'); s.value = {place}; "
            "s.dispatchEvent(new Event('input')); })()"
        )


def expected(plan: Plan, data: dict[str, Any], places: dict[str, int]) -> dict[str, Any]:
    """What the planner says of the same choices."""
    chosen = {name: data["choices"][name][place] for name, place in places.items()}
    groups = plan.cache.groups
    if chosen["heads"]["kv_heads"] is not None:
        heads = chosen["heads"]["kv_heads"]
        groups = tuple(replace(group, num_kv_heads=heads) if group.v_head_dim else group for group in groups)
    cache = CacheBytes(groups, chosen["format"]["name"], plan.cache.dtype)
    asked = replace(plan, cache=cache, context=chosen["context"], request=replace(plan.request, batch=chosen["batch"]))
    found = {
        "kv_bytes_per_token": float(cache.bytes_per_token),
        "kv_bytes": asked.kv_bytes,
        "weights_bytes": plan.weights_bytes,
        "crossover_tokens": asked.crossover_tokens,
        "bytes_read_per_token": round(asked.step.bytes_per_token),
        "max_sequences": None,
        "bound_tokens_per_s": None,
    }
    if chosen["hardware"]["name"] != "none":
        device = find_hardware(chosen["hardware"]["name"])
        budget = int(device.memory_bytes * DEVICE_SHARE) - plan.weights_bytes
        found["max_sequences"] = max(0, budget // cache.of(chosen["context"]))
        found["bound_tokens_per_s"] = chosen["batch"] / asked.step.seconds(device)
    return found


@needs_browser
@pytest.mark.parametrize("name", ["llama-2-7b", "mixtral-8x7b", *HYBRIDS])
def test_the_pages_arithmetic_is_the_planners(name: str, browser: Browser, tmp_path: Path) -> None:
    plan = planned(name)
    data = page_data(plan)
    browser.open(write(plan, tmp_path))
    last = {slider: len(data["choices"][slider]) - 1 for slider in SLIDERS}
    settings: list[dict[str, int]] = [dict(data["start"]), dict.fromkeys(SLIDERS, 0), last]
    settings += [
        {slider: (7 * number + 3 * index) % (last[slider] + 1) for index, slider in enumerate(SLIDERS)}
        for number in range(1, 8)
    ]
    for places in settings:
        set_sliders(browser, **places)
        shown = browser.value("window.octavoPlan()")
        for key, value in expected(plan, data, places).items():
            if value is None:
                assert shown[key] is None, (places, key)
            else:
                assert shown[key] == pytest.approx(value, rel=1e-12, abs=1), (places, key)


@needs_browser
def test_keyboard_alone(browser: Browser, tmp_path: Path) -> None:
    """Tab reaches every slider, table and summary; arrows move a slider and the figures with it."""
    browser.open(write(planned("llama-2-7b"), tmp_path))
    reached = []
    for slider in SLIDERS:
        browser.press("Tab")
        reached.append(browser.value("document.activeElement.id"))
        before = browser.value("document.getElementById('figures').textContent")
        spoken = browser.value("document.activeElement.getAttribute('aria-valuetext')")
        browser.press("Right", 2)  # bf16 and f16 have the same bytes
        assert browser.value("document.activeElement.getAttribute('aria-valuetext')") != spoken, slider
        assert browser.value("document.getElementById('figures').textContent") != before, slider
    assert tuple(reached) == SLIDERS
    browser.press("Tab", 2)
    assert browser.value("document.activeElement.className") == "wide"
    browser.press("Tab")
    assert browser.value("document.activeElement.tagName") == "SUMMARY"
    browser.press("Enter")
    browser.send("Input.dispatchKeyEvent", type="char", text="\r")
    assert browser.value("document.activeElement.parentElement.open") is True
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert browser.value(outline) == "solid", "the focus shows"


@needs_browser
def test_phone_width(browser: Browser, tmp_path: Path) -> None:
    """Nothing is wider than the screen; sliders are as high as a finger needs."""
    browser.resize(*PHONE)
    browser.open(write(planned("mixtral-8x7b"), tmp_path))
    browser.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert browser.value("document.documentElement.scrollWidth") <= PHONE[0]
    assert browser.value("window.innerWidth") == PHONE[0]
    heights = browser.value(
        "[...document.querySelectorAll('input')].map((each) => each.getBoundingClientRect().height)"
    )
    assert len(heights) == len(SLIDERS)
    assert min(heights) >= 24


@needs_browser
def test_no_request_leaves_the_page(browser: Browser, tmp_path: Path) -> None:
    path = write(planned("llama-2-7b"), tmp_path)
    browser.open(path)
    assert browser.value("document.querySelectorAll('#figures > div').length") == 7
    assert browser.value("document.querySelectorAll('#chart polyline').length") == 1
    assert browser.requests == [path.as_uri()]


@needs_browser
def test_every_control_has_a_name_and_the_page_its_language(browser: Browser, tmp_path: Path) -> None:
    browser.open(write(planned("llama-2-7b"), tmp_path))
    assert browser.value("document.documentElement.lang") == "en"
    unnamed = "[...document.querySelectorAll('input')].filter((each) => !each.labels.length).length"
    assert browser.value(unnamed) == 0
    tree = browser.send("Accessibility.getFullAXTree")["nodes"]
    sliders = [node for node in tree if node.get("role", {}).get("value") == "slider"]
    assert len(sliders) == len(SLIDERS)
    assert all(node["name"]["value"] for node in sliders)


def test_a_hostile_name_is_text_and_no_markup() -> None:
    plan = planned("llama")
    name = "</script><script>alert(1)</script>@DATA@"
    page = html_report(replace(plan, geometry=replace(plan.geometry, model=name)), Comparisons(plan))
    assert "<script>alert" not in page
    assert page.count("</script>") == 2
    assert "https://" not in page.replace("http://www.w3.org/2000/svg", "")
