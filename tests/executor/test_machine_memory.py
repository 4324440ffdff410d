"""Available memory and cores, read from made-up machines; the default share and the refusal of what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import MemoryBudgetError
from octavo.executor import memory

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:  33554432 kB\nMemFree:  1 kB\nMemAvailable:  16777216 kB\n"  # 16 GiB available


def test_without_control_groups_meminfo_counts(tmp_path: Path) -> None:
    assert memory.available_memory_bytes(machine(tmp_path, {"proc/meminfo": MEMINFO})) == 16 * GIB


def test_a_version_2_limit_counts_less_what_is_used(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/outer/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": f"{GIB}\n",
        },
    )
    assert memory.available_memory_bytes(root) == 6 * GIB


def test_a_version_1_limit_counts_and_no_limit_does_not(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    root = machine(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpuset:/\n4:memory:/job\n",
            f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}/memory.usage_in_bytes": "100\n",
            f"{group}/job/memory.limit_in_bytes": f"{4 * GIB}\n",
            f"{group}/job/memory.usage_in_bytes": f"{GIB}\n",
        },
    )
    assert memory.available_memory_bytes(root) == 3 * GIB


def test_more_used_than_the_limit_is_nothing_available(tmp_path: Path) -> None:
    files = {"memory.max": "100\n", "memory.current": "200\n"}
    root = machine(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
    machine(root / "sys/fs/cgroup", files)
    assert memory.available_memory_bytes(root) == 0


def test_without_meminfo_the_system_call_counts(tmp_path: Path) -> None:
    assert memory.available_memory_bytes(tmp_path) > 0


def test_the_real_machine_has_memory_and_cores() -> None:
    assert memory.available_memory_bytes() > 1 << 20
    assert memory.usable_cores() >= 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/cpu.max": "20000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "2:cpuacct,cpu:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
    ],
)
def test_a_cpu_quota_limits_the_cores(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert memory.usable_cores(machine(tmp_path, files)) == cores


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/cpu.max": "max 100000\n"},
        {"proc/self/cgroup": "2:cpu:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n"},
    ],
)
def test_without_a_quota_every_core_counts(tmp_path: Path, files: dict[str, str]) -> None:
    import os

    assert memory.usable_cores(machine(tmp_path, files)) == len(os.sched_getaffinity(0))


def test_the_default_budget() -> None:
    assert memory.default_budget_bytes(6 * GIB, 1) == 3 * GIB  # half
    assert memory.default_budget_bytes(64 * GIB, 1) == 4 * GIB  # at most 4 GiB
    assert memory.default_budget_bytes(64 * GIB, 10 * GIB) == 10 * GIB  # but one whole request
    assert memory.default_budget_bytes(16 * GIB, 10 * GIB) == 8 * GIB  # within the half


def test_what_cannot_be_held_is_refused_before_it_is_loaded() -> None:
    memory.check_before_loading(60, None, 60)
    memory.check_before_loading(60, 40, 100)
    with pytest.raises(MemoryBudgetError, match=r"weights need 61 bytes, but 60 bytes .*; take a smaller model"):
        memory.check_before_loading(61, 1, 60)
    with pytest.raises(
        MemoryBudgetError, match=r"given 41 bytes .*weights need 60, but 100 .*--kv-cache-memory to at most 40"
    ):
        memory.check_before_loading(60, 41, 100)


def test_a_budget_that_the_machine_does_not_have_is_refused() -> None:
    memory.check_budget(100, 100)
    with pytest.raises(MemoryBudgetError, match=r"101 bytes.* 100 bytes.*--kv-cache-memory"):
        memory.check_budget(101, 100)
