import os
import subprocess
import sys

import pytest

from benchmarks import processor


def test_processor_time_of_others_is_what_was_spent_less_our_own(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    # user nice system idle iowait irq softirq steal guest guest_nice, of which guests are part of user and nice.
    stat.write_text("cpu  1000 200 300 99999 88888 40 50 60 7777 0\ncpu0 1 1 1\n")
    monkeypatch.setattr(processor, "STAT", stat)
    monkeypatch.setattr(processor, "_own_seconds", lambda: 2.0)
    spent = (1000 + 200 + 300 + 40 + 50 + 60) / os.sysconf("SC_CLK_TCK")
    assert processor.foreign_seconds() == pytest.approx(spent - 2.0)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_children_are_our_own_whether_they_end_or_are_ended(limit):
    code = "import time\nwhile time.process_time() < 1: pass"
    before = processor._own_seconds()
    if limit:
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", code], timeout=limit, check=True)
    else:
        subprocess.run([sys.executable, "-c", code], check=True)
    assert processor._own_seconds() - before > (0.1 if limit else 0.9)


@pytest.mark.parametrize("content", [None, "", "cpu 1 2"])
def test_a_system_that_does_not_tell(tmp_path, monkeypatch, content):
    monkeypatch.setattr(processor, "STAT", tmp_path / "stat")
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert processor.foreign_seconds() is None


def test_a_share_is_of_all_cores():
    assert processor.share_of_others(3.0, 10.0) == pytest.approx(0.3 / os.cpu_count())
    assert processor.share_of_others(-0.01, 10.0) == 0
    assert processor.share_of_others(0.01, 1e-6) == 1


def test_the_grain_of_the_clock_disturbs_nobody():
    assert not processor.is_disturbing(0.02, 0.001)
    assert not processor.is_disturbing(1.0, 1000.0)
    assert processor.is_disturbing(0.2, 1.0)
