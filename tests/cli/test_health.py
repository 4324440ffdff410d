"""The doctor finds what is wrong, says how to cure it, and its exit code tells a script."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli import health
from octavo.cli.doctor import report
from octavo.cli.health import (
    PACKAGES,
    Kernels,
    Problem,
    cache_dir_problems,
    compiler_problems,
    examine,
    examine_kernels,
    memory_problems,
    package_problems,
    python_problems,
)
from octavo.cli.machine_probe import linear_speed, read_bandwidth
from octavo.cli.main import run
from octavo.kernels.native import supported_instruction_sets


def test_this_machine_is_described() -> None:
    found = examine(Path.home(), measure=False)
    assert found.instruction_sets == tuple(supported_instruction_sets())
    assert found.instruction_set in found.instruction_sets
    assert found.cores == found.threads >= 1
    assert found.memory_available_bytes > 0
    assert set(found.packages) == set(PACKAGES)
    assert found.read_bytes_per_s is None
    assert found.linear_flops_per_s == {}


def test_memory_and_kernels_are_measured() -> None:
    assert read_bandwidth(2, available_bytes=1) > 0
    for dtype in ("bf16", "f32"):
        assert linear_speed(1, "auto", dtype) > 0


def test_report_says_everything_once() -> None:
    found = dataclasses.replace(
        examine(Path.home(), measure=False), read_bytes_per_s=12.34e9, linear_flops_per_s={"bf16": 1e11}, problems=()
    )
    text = "\n".join(report(found))
    assert "12.3 GB/s" in text
    assert "100 GFLOP/s" in text
    assert "no problems found" in text
    assert found.processor in text
    sick = dataclasses.replace(
        found, problems=(Problem(True, "it burns", "pour water"), Problem(False, "it smells", "air"))
    )
    text = "\n".join(report(sick))
    assert "PROBLEM: it burns; pour water" in text
    assert "warning: it smells; air" in text
    assert "no problems" not in text


def test_every_problem_has_a_cure(tmp_path: Path) -> None:
    assert python_problems((3, 11)) == ()
    assert "3.11" in python_problems((3, 9))[0].cure
    assert package_problems({"numpy": "2"}) == ()
    assert package_problems({"numpy": "2", "gguf": "not installed"})[0].cure == "run `pip install gguf`"
    assert memory_problems(8 << 30) == ()
    assert "900.0 MiB" in memory_problems(900 << 20)[0].what
    assert cache_dir_problems(tmp_path / "not" / "there" / "yet") == ()
    (tmp_path / "file").touch()
    assert "OCTAVO_CACHE" in cache_dir_problems(tmp_path / "file" / "models")[0].cure
    assert compiler_problems(None, has_kernels=True) == ()
    assert compiler_problems("g++", has_kernels=False) == ()
    assert "install g++" in compiler_problems(None, has_kernels=False)[0].cure


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = (100, 90, 10)
    monkeypatch.setattr(health.shutil, "disk_usage", lambda _: type("Usage", (), {"free": usage[2]})())
    assert "only 10 B are free" in cache_dir_problems(tmp_path)[0].what


def test_only_portable_kernels_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kernels.native.supported_instruction_sets", lambda: ["portable"])
    found = examine_kernels(1, measure=False)
    assert found.instruction_sets == ("portable",)
    assert [problem.fatal for problem in found.problems] == [False]


def test_doctor_prints_json_and_gives_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    healthy = run(["doctor", "--json", "--no-measure"])
    found = json.loads(capsys.readouterr().out)
    assert found["cache_dir"] == str(tmp_path)
    assert healthy == (1 if any(problem["fatal"] for problem in found["problems"]) else 0)
    broken = Kernels(problems=(Problem(True, "the kernels cannot be loaded", "run `pip install .`"),))
    monkeypatch.setattr(health, "examine_kernels", lambda threads, *, measure: broken)
    assert run(["doctor", "--no-measure"]) == 1
    told = capsys.readouterr().out
    assert "PROBLEM: the kernels cannot be loaded; run `pip install .`" in told


def test_missing_kernels_do_not_stop_the_doctor() -> None:
    """As after an installation that compiled nothing."""
    code = (
        "import sys; sys.modules['octavo.kernels._native'] = None\n"
        "from octavo.cli.main import run; sys.exit(run(['doctor', '--no-measure']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "PROBLEM: the native kernels cannot be loaded" in done.stdout
    assert "pip install ." in done.stdout
    assert "Traceback" not in done.stderr
