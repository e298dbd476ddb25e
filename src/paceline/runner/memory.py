"""How much memory this process may really use, and how much it uses."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def available_memory(cgroup: Path = CGROUP, proc: Path = PROC) -> int:
    """Bytes that can still be taken without swapping: the machine's, or less where a control group sets a limit."""
    return min(_machine_available(proc), _cgroup_available(cgroup))


def resident_memory(proc: Path = PROC) -> int:
    """Bytes of this process that lie in memory now."""
    return _status_field(proc / "self", "VmRSS")


def peak_memory(pid: int | None = None, proc: Path = PROC) -> int:
    """Bytes of this process, or of another one of this user, that lay in memory at the most."""
    return _status_field(proc / ("self" if pid is None else str(pid)), "VmHWM")


def gib(count: float) -> str:
    """A number of bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _machine_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("MemAvailable is missing in /proc/meminfo")


def _cgroup_available(cgroup: Path) -> int:
    """Version 2 first, then version 1. Pages of cached files count as used there but are given back when needed."""
    for limit, usage, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (cgroup / limit).read_text().strip()
            used = int((cgroup / usage).read_text())
            statistics = ((cgroup / limit).parent / "memory.stat").read_text()
        except OSError:
            continue
        if most == "max":
            break
        cached = next((int(line.split()[1]) for line in statistics.splitlines() if line.split()[0] == inactive), 0)
        return max(0, int(most) - used + cached)
    return 2**63


def _status_field(process: Path, field: str) -> int:
    for line in (process / "status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{field} is missing in {process / 'status'}")
