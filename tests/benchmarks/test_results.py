import json
import os

import pytest

from benchmarks import results


def test_a_result_says_where_it_comes_from():
    record = results.record("counts", ["counts", "--quick"], True, [], {"a": 1})
    assert record["line"] == "python -m benchmarks counts --quick"
    somewhere = ["recipe", "--data", "/home/me/images", "--out", "x.json", "--budget", "3"]
    line = results.record("recipe", somewhere, False, [], {})["line"]
    assert line == "python -m benchmarks recipe --data DIR --out FILE --budget 3"
    line = results.record(
        "overhead", ["overhead", "--data=/home/me", "--variants", "AOC", "orthogonium AOC"], False, [], {}
    )["line"]
    assert line == "python -m benchmarks overhead --data DIR --variants AOC 'orthogonium AOC'"
    assert record["machine"].keys() == {"cpu", "cores", "memory_gb", "system"}
    assert record["versions"]["torch"]
    assert record["threads"] >= 1
    json.dumps(record)


def test_written_results_are_read_again(tmp_path):
    record = results.record("counts", ["counts"], False, [], {"a": [1.5]})
    results.write(record, tmp_path / "deep" / "counts.json")
    assert results.read(tmp_path / "deep") == {"counts": record}
    assert os.listdir(tmp_path / "deep") == ["counts.json"]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "counts.json"
    results.write({"command": "counts"}, path)
    with pytest.raises(ValueError, match="JSON"):
        results.write({"command": float("nan")}, path)
    assert json.loads(path.read_text()) == {"command": "counts"}


def test_quick_results_do_not_replace_real_ones():
    assert results.default_path("counts", True) != results.default_path("counts", False)
