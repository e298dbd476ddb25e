from __future__ import annotations

from pathlib import Path

import pytest

from paceline.runner.memory import available_memory, gib, peak_memory, resident_memory


def fake_proc(folder: Path, available_kib: int) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {available_kib} kB\n")
    (folder / "self/status").write_text("Name:\tx\nVmRSS:\t    2048 kB\nVmHWM:\t    4096 kB\n")
    return folder


def test_a_control_group_limits_what_is_available(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", 1_000_000)
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "memory.max").write_text("500000000\n")
    (group / "memory.current").write_text("200000000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 50000000\n")
    assert available_memory(group, proc) == 350_000_000


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", 1_000_000)
    group = tmp_path / "cgroup"
    assert available_memory(group, proc) == 1_000_000 * 1024
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1\n")
    (group / "memory.stat").write_text("")
    assert available_memory(group, proc) == 1_000_000 * 1024


def test_the_older_control_groups_are_read_too(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", 1_000_000)
    group = tmp_path / "cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("1000\n")
    (group / "memory.usage_in_bytes").write_text("400\n")
    (group / "memory.stat").write_text("total_inactive_file 100\n")
    assert available_memory(tmp_path / "cgroup", proc) == 700


def test_resident_memory_is_read_in_bytes(tmp_path: Path) -> None:
    assert resident_memory(fake_proc(tmp_path, 1)) == 2048 * 1024
    assert resident_memory() > 2**20


def test_peak_memory_is_this_process_own_or_another_one(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, 1)
    assert peak_memory(proc=proc) == 4096 * 1024
    (proc / "7").mkdir()
    (proc / "7/status").write_text("VmHWM: 1 kB\n")
    assert peak_memory(7, proc) == 1024
    assert peak_memory() >= resident_memory()


@pytest.mark.parametrize(("count", "text"), [(2**30, "1.00 GiB"), (3 * 2**29, "1.50 GiB"), (2**20, "1.0 MiB")])
def test_sizes_are_shown_for_people(count: int, text: str) -> None:
    assert gib(count) == text
