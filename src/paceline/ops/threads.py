"""How many cores this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")
SELF_CGROUP = Path("/proc/self/cgroup")


def usable_cores(cgroup: Path = CGROUP, cpus: Path = CPUS, self_cgroup: Path = SELF_CGROUP) -> tuple[int, str]:
    """The count, at least 1, and what set it, for people.

    It is the least of: the processors in the affinity mask; the physical cores among them, as two hardware threads of a
    core share the vector units that the kernels keep busy; the control group's quota, rounded down, as a thread beyond
    it would be stopped in the middle of every step.
    """
    affinity = _affinity()
    limits = [
        (len(affinity), f"{len(affinity)} processors in the affinity mask"),
        (_physical_cores(affinity, cpus), "physical cores among them"),
    ]
    quota = _quota(cgroup, self_cgroup)
    if quota is not None:
        limits.append((max(1, int(quota)), f"control group quota of {quota:.2f} processors"))
    return min(limits, key=lambda limit: limit[0])


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical_cores(processors: set[int], cpus: Path) -> int:
    """Distinct sets of sibling threads; a processor whose topology cannot be read counts as a core."""
    cores = set()
    for processor in processors:
        try:
            siblings = (cpus / f"cpu{processor}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = f"{processor}"
        cores.add(siblings)
    return len(cores)


def _quota(cgroup: Path, self_cgroup: Path) -> float | None:
    """The tightest quota on the way from the process's control group to the root, in processors; None without one."""
    quotas = []
    for line in _lines(self_cgroup):
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            root, read = cgroup, _quota_v2
        elif "cpu" in controllers.split(","):
            root, read = cgroup / "cpu", _quota_v1
        else:
            continue
        folder = root / group.lstrip("/")
        # A container sees its own group as the root, while the name is the host's: then only the root exists.
        for path in (folder, *folder.parents):
            quota = read(path)
            if quota is not None:
                quotas.append(quota)
            if path == root:
                break
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    for line in _lines(folder / "cpu.max"):
        quota, period = line.split()
        return None if quota == "max" else int(quota) / int(period)
    return None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _lines(folder / "cpu.cfs_quota_us"), _lines(folder / "cpu.cfs_period_us")
    if not quota or not period or int(quota[0]) <= 0:
        return None
    return int(quota[0]) / int(period[0])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
