"""How much memory and how many cores this process may use, and what share of the memory the KV cache takes.

It knows the files of Linux (`/proc/meminfo`, control groups 1 and 2) and `os.sysconf` elsewhere; not what the memory
is for. All paths hang below `root`, so that a test can lay out a machine of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from octavo.errors import MemoryBudgetError

DEFAULT_SHARE = 0.5
DEFAULT_CAP_BYTES = 4 << 30
_UNLIMITED = 1 << 62  # control group 1 writes "no limit" as a number near 2**63


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping: what the machine has left, within this process's control groups."""
    machine = _meminfo_available(root / "proc/meminfo")
    if machine is None:
        machine = _sysconf_available()
    return max(0, min([machine, *_control_group_bytes(root)]))


def resident_bytes(root: Path = Path("/")) -> int:
    """Bytes of this process that are in memory now, its mapped files among them."""
    return _process_bytes(root, "VmRSS")


def peak_resident_bytes(root: Path = Path("/")) -> int:
    """The most that ever were."""
    return _process_bytes(root, "VmHWM")


def _process_bytes(root: Path, wanted: str) -> int:
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    import resource  # not on every system, and on none that has /proc is it needed

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, within the CPU quota of its control groups; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _control_groups(root, "cpu"):
        quota = _quota_cores(folder)
        if quota is not None:
            cores = min(cores, max(1, round(quota)))
    return max(1, cores)


def default_budget_bytes(available_bytes: int, one_request_bytes: int) -> int:
    """The KV cache's share where none was asked for: half of what is available once the weights are loaded, at most
    4 GiB, or as much more (within that half) as one request of the whole context needs."""
    share = int(available_bytes * DEFAULT_SHARE)
    return min(share, max(DEFAULT_CAP_BYTES, one_request_bytes))


def check_before_loading(weights_bytes: int, budget_bytes: int | None, available_bytes: int) -> None:
    """Refuse weights, or weights and a budget, that the machine cannot hold: MemoryBudgetError, nothing read."""
    has = f"{available_bytes} bytes of memory are available"
    if weights_bytes > available_bytes:
        raise MemoryBudgetError(
            f"the model's weights need {weights_bytes} bytes, but {has}; take a smaller model, pass --weights-dtype "
            f"bf16 where it is f32, or end other programs"
        )
    if budget_bytes is not None and weights_bytes + budget_bytes > available_bytes:
        raise MemoryBudgetError(
            f"the KV cache was given {budget_bytes} bytes and the model's weights need {weights_bytes}, but {has}; set "
            f"--kv-cache-memory to at most {available_bytes - weights_bytes}"
        )


def check_budget(budget_bytes: int, available_bytes: int) -> None:
    """Refuse a budget that the machine does not have: MemoryBudgetError."""
    if budget_bytes > available_bytes:
        raise MemoryBudgetError(
            f"the KV cache was given {budget_bytes} bytes, but {available_bytes} bytes of memory are available after "
            f"the weights; set --kv-cache-memory to at most that"
        )


def _meminfo_available(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024  # the file counts kibibytes
    return None


def _sysconf_available() -> int:
    """Free memory; half of what is built in where the system does not tell."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * page_bytes
    return os.sysconf("SC_PHYS_PAGES") * page_bytes // 2


def _control_groups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and all those above it, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        own = base / path.lstrip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return folders


def _control_group_bytes(root: Path) -> list[int]:
    """What is left below each memory limit; page cache that can be dropped counts as left."""
    found = []
    for folder in _control_groups(root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                found.append(limit - usage + _inactive_file_bytes(folder / "memory.stat"))
    return found


def _inactive_file_bytes(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))


def _quota_cores(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    group_quota, group_period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if group_quota is None or group_period is None or group_quota <= 0:
        return None
    return group_quota / group_period


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.lstrip("-").isdigit() else None
