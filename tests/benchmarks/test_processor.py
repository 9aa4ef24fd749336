import os
from types import SimpleNamespace

import pytest

from benchmarks import processor


def test_processor_time_of_others_is_what_was_spent_less_our_own(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    # user nice system idle iowait irq softirq steal guest guest_nice, of which guests are part of user and nice.
    stat.write_text("cpu  1000 200 300 99999 88888 40 50 60 7777 0\ncpu0 1 1 1\n")
    monkeypatch.setattr(processor, "STAT", stat)
    own = (1.0, 0.5, 0.25, 0.25, 123.0)
    monkeypatch.setattr(processor, "os", SimpleNamespace(times=lambda: own, sysconf=lambda name: 100))
    assert processor.foreign_seconds() == pytest.approx((1000 + 200 + 300 + 40 + 50 + 60) / 100 - 2.0)


@pytest.mark.parametrize("content", [None, "", "cpu 1 2"])
def test_a_system_that_does_not_tell(tmp_path, monkeypatch, content):
    monkeypatch.setattr(processor, "STAT", tmp_path / "stat")
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert processor.foreign_seconds() is None
    assert processor.share_of_others(None, 1.0) is None


def test_a_share_is_of_all_cores():
    assert processor.share_of_others(3.0, 10.0) == pytest.approx(0.3 / os.cpu_count())
    assert processor.share_of_others(-0.01, 10.0) == 0
