"""The page of faults names tests that exist, and leaves out no fault that a test claims to hold off."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/reference/faults.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 30
    for path, name in named:
        text = (REPOSITORY / path).read_text()
        assert re.search(rf"^(async )?def {name}\(|^{name} = ", text, re.M), f"{path}::{name}"


def test_large_tests_are_marked_so() -> None:
    for path, name, large in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`( \(large\))?", PAGE):
        decorators = (REPOSITORY / path).read_text().split(f"def {name}(")[0].split("\n\n\n")[-1]
        assert ("@pytest.mark.large" in decorators) is bool(large), f"{path}::{name}"


def test_every_fault_in_the_name_of_a_test_has_its_row() -> None:
    rows = set(re.findall(r"^\| (F\d+) \|", PAGE, re.M))
    for path in (REPOSITORY / "tests/core").glob("test_*.py"):
        for name in re.findall(r"^def (test_f\d+\w*)", path.read_text(), re.M):
            for number in re.findall(r"f(\d+)_", name):
                assert f"F{number}" in rows, name
