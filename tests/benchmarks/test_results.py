import json
import os

import pytest

from benchmarks import results

SPENT = {"seconds": 1.0}


def test_a_result_says_where_it_comes_from():
    record = results.record(results.about("counts", ["counts", "--quick"], True, []), {"seconds": 61.0}, {"a": 1})
    assert record["data"] == {"a": 1}
    assert record["date"].endswith("UTC")
    assert record["seconds"] == 61.0
    assert len(record["code"]) == 12
    assert record["line"] == "python -m benchmarks counts --quick"
    assert record["machine"].keys() == {"cpu", "cores", "memory_gb", "system"}
    assert record["versions"]["torch"]
    assert record["threads"] >= 1
    json.dumps(record)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (["recipe", "--data", "/home/me", "--out", "x.json", "--budget", "3"], "--data DIR --budget 3"),
        (["overhead", "--data=/home/me", "--variants", "AOC", "a b"], "--data DIR --variants AOC 'a b'"),
        (["scaling", "--resume", "--rounds", "3", "--again", "kernels", "--out=x"], "--rounds 3"),
    ],
)
def test_a_command_is_shown_as_it_would_be_typed_for_the_whole_elsewhere(line, shown):
    assert results.about(line[0], line, False, [])["line"] == f"python -m benchmarks {line[0]} {shown}"


def test_written_results_are_read_again(tmp_path):
    record = results.record(results.about("counts", ["counts"], False, []), SPENT, {"a": [1.5]})
    results.write(record, tmp_path / "deep" / "counts.json")
    assert results.read(tmp_path / "deep") == {"counts": record}
    assert os.listdir(tmp_path / "deep") == ["counts.json"]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "counts.json"
    results.write({"command": "counts"}, path)
    with pytest.raises(ValueError, match="JSON"):
        results.write({"command": float("nan")}, path)
    assert json.loads(path.read_text()) == {"command": "counts"}


def test_nothing_but_a_result_of_the_same_command_is_replaced(tmp_path):
    path = tmp_path / "x.json"
    results.refuse_other(path, "counts")
    results.write({"command": "counts"}, path)
    results.refuse_other(path, "counts")
    with pytest.raises(ValueError, match=r"x\.json is a result of counts: move it, or give --out"):
        results.refuse_other(path, "kernels")
    path.write_text("my diary")
    with pytest.raises(ValueError, match=r"x\.json is no result"):
        results.refuse_other(path, "counts")


@pytest.mark.parametrize(("line", "missing"), [("a --budget 5", []), ("a", ["orthogonium is not installed"])])
def test_a_result_of_another_kind_of_run_is_kept(tmp_path, line, missing):
    path = tmp_path / "x.json"
    old, new = {"line": "a", "missing": [], "quick": False}, {"line": line, "missing": missing, "quick": False}
    results.write(old, path)
    assert results.set_aside(path, old) is None
    first = results.set_aside(path, new)
    assert not path.exists()
    assert results.set_aside(path, new) is None
    results.write(new, path)
    second = results.set_aside(path, old)
    assert [json.loads(kept.read_text()) for kept in (first, second)] == [old, new]
    results.write({**old, "quick": True}, path)
    assert results.set_aside(path, new) is None


def test_two_results_of_one_command_are_refused(tmp_path):
    for name in ("a", "b"):
        results.write(
            results.record(results.about("counts", ["counts"], False, []), SPENT, {}), tmp_path / f"{name}.json"
        )
    with pytest.raises(ValueError, match=r"b\.json is a second result of counts"):
        results.read(tmp_path)


def test_quick_results_do_not_replace_real_ones():
    assert results.default_path("counts", True) != results.default_path("counts", False)
