"""Memory that fits in the processor's cache is not compared with the bandwidth of the memory."""

import pytest

import onward
from onward.native import last_level_cache_bytes
from onward.testing import tiny_model


def test_the_largest_cache_counts(tmp_path):
    assert last_level_cache_bytes(tmp_path) == 0
    for index, size in enumerate(("32K", "1M", "nonsense", "")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert last_level_cache_bytes(tmp_path) == 2**20


@pytest.mark.parametrize(("size", "cached"), [(0, False), (1 << 40, True)])
def test_no_bandwidth_is_reported_for_weights_that_fit_the_cpu_cache(size, cached, monkeypatch):
    monkeypatch.setattr("onward.program.program.last_level_cache_bytes", lambda: size)
    report = onward.LanguageModel(tiny_model()).explain()
    if report.rows:
        assert (" cache" in str(report)) == cached
