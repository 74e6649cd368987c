from pathlib import Path

import pytest

from headrace.core.kv.memory import available_memory
from headrace.hooks.errors import MemoryPlanError

MEMINFO = """\
MemTotal:       16000000 kB
MemFree:         1000000 kB
MemAvailable:    8000000 kB
HugePages_Total:       0
"""
HOST = 8_000_000 * 1024
UNLIMITED_V1 = 9223372036854771712


class Machine:
    """A folder that looks like a Linux machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", MEMINFO)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def version_2(self, group: str, limit: int | str, usage: int, inactive: int = 0) -> None:
        folder = f"sys/fs/cgroup/{group}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file 7\n")

    def version_1(self, group: str, limit: int, usage: int, inactive: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_without_cgroups_it_is_what_the_kernel_calls_available(machine):
    assert available_memory(machine.root) == HOST


def test_a_cgroup_leaves_its_limit_minus_its_usage(machine):
    machine.write("proc/self/cgroup", "0::/box\n")
    machine.version_2("box", 4_000_000_000, 1_000_000_000)
    assert available_memory(machine.root) == 3_000_000_000


def test_cached_files_of_a_cgroup_are_not_usage(machine):
    machine.write("proc/self/cgroup", "0::/box\n")
    machine.version_2("box", 4_000_000_000, 1_000_000_000, inactive=400_000_000)
    assert available_memory(machine.root) == 3_400_000_000


def test_max_is_no_limit(machine):
    machine.write("proc/self/cgroup", "0::/box\n")
    machine.version_2("box", "max", 1_000_000_000)
    assert available_memory(machine.root) == HOST


def test_the_tightest_cgroup_above_counts(machine):
    machine.write("proc/self/cgroup", "0::/slice/box/inner\n")
    machine.version_2("slice", 2_000_000_000, 500_000_000)
    machine.version_2("slice/box", "max", 400_000_000)
    machine.version_2("slice/box/inner", 3_000_000_000, 400_000_000)
    assert available_memory(machine.root) == 1_500_000_000


def test_a_container_finds_its_limit_at_the_root(machine):
    machine.write("proc/self/cgroup", "0::/\n")
    machine.version_2("", 2_000_000_000, 500_000_000)
    assert available_memory(machine.root) == 1_500_000_000


def test_a_cgroup_of_version_1_counts_too(machine):
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/abc\n1:name=systemd:/a:b\n0::/\n")
    machine.version_1("", UNLIMITED_V1, 9_000_000_000)
    machine.version_1("docker/abc", 2_000_000_000, 700_000_000, inactive=200_000_000)
    assert available_memory(machine.root) == 1_500_000_000


def test_a_container_of_version_1_whose_path_is_the_hosts_uses_the_mounted_root(machine):
    machine.write("proc/self/cgroup", "4:memory:/docker/abc\n")
    machine.version_1("", 1_000_000_000, 300_000_000)
    assert available_memory(machine.root) == 700_000_000


def test_a_cgroup_over_its_limit_leaves_nothing(machine):
    machine.write("proc/self/cgroup", "0::/box\n")
    machine.version_2("box", 1_000_000_000, 1_200_000_000)
    assert available_memory(machine.root) == 0


def test_a_kernel_that_does_not_say_is_an_error(machine):
    machine.write("proc/meminfo", "MemTotal: 16000000 kB\n")
    with pytest.raises(MemoryPlanError, match="must have a MemAvailable line"):
        available_memory(machine.root)


def test_a_system_without_proc_is_asked_for_its_pages(tmp_path):
    assert available_memory(tmp_path) > 0


def test_this_machine_answers():
    assert available_memory() > 0
