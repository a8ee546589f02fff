"""How much memory a process may still take."""

from __future__ import annotations

from panorgan.data.free_memory import free_memory


def test_the_limit_of_a_container_counts(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable:   700 kB\n")
    assert free_memory(meminfo, tmp_path) == 700 * 1024
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("200000\n")
    assert free_memory(meminfo, tmp_path) == 300_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(meminfo, tmp_path) == 700 * 1024
    assert free_memory(tmp_path / "none", tmp_path / "none") is None
