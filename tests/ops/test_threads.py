"""The number of cores: the affinity mask, the cores behind it, and the control group's quota."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.ops import threads


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight processors on four cores, and no control group."""
    monkeypatch.setattr(threads, "_affinity", lambda: set(range(8)))
    for processor in range(8):
        folder = tmp_path / f"cpus/cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{processor % 4},{processor % 4 + 4}\n")
    (tmp_path / "self").write_text("0::/\n")
    return tmp_path


def count(machine: Path) -> tuple[int, str]:
    return threads.usable_cores(machine / "cgroup", machine / "cpus", machine / "self")


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_two_hardware_threads_are_one_core(machine: Path) -> None:
    assert count(machine) == (4, "physical cores among them")


def test_the_affinity_mask_limits(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_affinity", lambda: {1, 2})
    assert count(machine) == (2, "2 processors in the affinity mask")
    monkeypatch.setattr(threads, "_affinity", lambda: {1, 5})
    assert count(machine)[0] == 1


def test_processors_without_a_topology_are_cores(machine: Path) -> None:
    assert threads.usable_cores(machine / "cgroup", machine / "none", machine / "self")[0] == 8


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4)]
)
def test_a_quota_of_version_2_is_rounded_down_but_never_to_nothing(machine: Path, text: str, cores: int) -> None:
    put(machine / "cgroup/cpu.max", text + "\n")
    assert count(machine)[0] == cores


def test_the_quota_of_an_outer_group_counts_too(machine: Path) -> None:
    (machine / "self").write_text("0::/outer/inner\n")
    put(machine / "cgroup/outer/inner/cpu.max", "300000 100000\n")
    put(machine / "cgroup/outer/cpu.max", "200000 100000\n")
    assert count(machine) == (2, "control group quota of 2.00 processors")


@pytest.mark.parametrize(("quota", "cores"), [("-1", 4), ("150000", 1)])
def test_a_quota_of_version_1(machine: Path, quota: str, cores: int) -> None:
    (machine / "self").write_text("5:memory:/x\n4:cpu,cpuacct:/box\n")
    put(machine / "cgroup/cpu/cpu.cfs_quota_us", quota)
    put(machine / "cgroup/cpu/cpu.cfs_period_us", "100000")
    assert count(machine)[0] == cores
