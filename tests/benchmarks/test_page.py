"""The page is what the committed results make, and what it says about the peer holds in them."""

import json
import re
from statistics import median

import pytest
from benchmarks.__main__ import main
from benchmarks.page import PAGE, QUESTIONS, drawn, question, render
from benchmarks.report import Figure, Plot, Table

from benchmarks import orthogonalizers, overhead, results, scaling

FOUND = results.read(results.FOLDER)
DATA = {name: result["data"] for name, result in FOUND.items()}


def test_committed_page_is_what_the_committed_results_make():
    assert FOUND.keys() == QUESTIONS.keys()
    assert PAGE.read_text() == render(FOUND), "run python -m benchmarks page"
    figures = {path.stem for path in (PAGE.parent / "figures").glob("*.svg")}
    assert figures == set(drawn(FOUND)), "run python -m benchmarks page, and delete figures that are not on it"


@pytest.mark.parametrize("name", QUESTIONS)
def test_tables_have_as_many_cells_as_columns(name):
    tables = [part for part in question(name).describe(DATA[name]) if isinstance(part, Table)]
    assert tables
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert all(len(set(map(len, table.text().splitlines()[bool(table.title) :]))) == 1 for table in tables)


STEP, EVAL, PEAK = (overhead.ratios(DATA["overhead"], what) for what in overhead.MEASURED)
SMALL, DEPTHWISE, LARGE = (
    "bcop-small, 32 x 32, batch 128",
    "depthwise, 32 x 32, batch 32",
    "resnet34, 224 x 224, batch 8",
)


def test_the_overhead_paragraph_holds():
    ours, theirs = "SOC", "orthogonium SOC"
    assert (round(STEP[LARGE][theirs], 1), round(STEP[LARGE][ours])) == (8.6, 16)
    assert all(PEAK[case][theirs] < PEAK[case][ours] for case in PEAK if theirs in PEAK[case])
    assert all(EVAL[case][theirs] > EVAL[case][ours] for case in EVAL if theirs in EVAL[case])
    assert STEP[SMALL][theirs] > STEP[SMALL][ours]
    adaptive = {case: (STEP[case]["orthogonium adaptive SOC"], STEP[case]["SOC, 3 terms"]) for case in STEP}
    assert [round(value, 1) for value in adaptive[SMALL]] == [2.7, 4.8]
    assert [round(value, 1) for value in adaptive[DEPTHWISE]] == [2.6, 3.1]
    assert all(STEP[case]["orthogonium AOC, QR"] < STEP[case]["orthogonium AOC"] for case in STEP)
    assert all(0.9 < PEAK[case]["orthogonium AOC, QR"] < 1.05 for case in PEAK if case != LARGE)


def test_the_kernel_and_scaling_paragraphs_hold():
    for entry in DATA["kernels"]["square"]:
        ours, theirs = (entry["rows"][name] for name in ("trysquare", "orthogonium"))
        assert median(ours["seconds"]) < median(theirs["seconds"])
        assert all(ours[key] < theirs[key] for key in ("flops", "calls", "saved"))
    for entries in DATA["scaling"]["kernels"].values():
        for entry in entries:
            ours, theirs = (median(entry["seconds"][name]) for name in ("trysquare", "orthogonium"))
            assert ours < theirs
    last = {name: 1e3 * median(s) for name, s in DATA["scaling"]["kernels"]["groups"][-1]["seconds"].items()}
    assert {name: round(value, 1) for name, value in last.items()} == {"trysquare": 1.1, "orthogonium": 1.7}
    for kind, entries in DATA["scaling"]["overhead"].items():
        ours, theirs = scaling.added(kind, entries).values()
        assert all(ours[x] < theirs[x] for x in ours)


def test_the_forecast_paragraph_holds():
    entries = [entry for entry in DATA["forecast"]["forecasts"] if entry["cards"] == 1]
    (steps,) = (e["steps"] for e in entries if (e["case"], e["card"]) == ("resnet34, float32, batch 512", "RTX 4090"))
    ours = [steps[f"AOC, {way}"] - steps["Conv2d, our padding"] for way in ("one by one", "together")]
    theirs = steps["orthogonium AOC"] - steps["Conv2d"]
    assert [round(1e3 * seconds) for seconds in (*ours, theirs)] == [122, 35, 72]
    for entry in entries:  # built together, ours adds less on every card and at every batch
        if "orthogonium AOC" in entry["steps"]:
            added = entry["steps"]["AOC, together"] - entry["steps"]["Conv2d, our padding"]
            assert added < entry["steps"]["orthogonium AOC"] - entry["steps"]["Conv2d"]


def test_the_training_paragraphs_hold():
    rows = DATA["methods"]["accuracy"]["rows"]
    peer, own = rows["orthogonium aol"], rows["aol"]
    assert all(theirs > ours for theirs, ours in zip(peer["certified"], own["certified"], strict=True))
    shares = [peer["certified"][0], own["certified"][0], peer["certified"][3], own["certified"][3]]
    assert [f"{share:.1%}" for share in shares] == ["34.5%", "31.9%", "8.6%", "3.1%"]
    assert [f"{row['accuracy']:.1%}" for row in (peer, own)] == ["43.0%", "47.2%"]
    assert peer["lipschitz"] == pytest.approx(0.25, abs=0.01)
    assert rows["orthogonium aoc"]["accuracy"] < rows["aoc"]["accuracy"]
    for entry in DATA["methods"]["costs"]:
        steps = {name: median(seconds) for name, seconds in entry["seconds"]["step"].items()}
        assert all(steps[f"orthogonium {name}"] > steps[name] for name in ("aoc", "aol"))
    runs = DATA["recipe"]["rows"]
    assert [run["steps"] for run in runs.values()] == [7013, 1656, 5446]
    ours, default, by_qr = (run["results"][-1] for run in runs.values())
    assert all(ours["accuracy"] > other["accuracy"] for other in (default, by_qr))
    assert 100 * (ours["certified"][0] - by_qr["certified"][0]) == pytest.approx(3.5, abs=0.05)


def test_the_orthogonalizer_paragraph_holds():
    data = DATA["orthogonalizers"]
    *smaller, largest = ({name: 1e3 * median(s) for name, s in e["seconds"].items()} for e in data["times"])
    assert [round(largest[name]) for name in ("orthogonium QR", "qr")] == [17, 20]
    assert all(entry["qr"] <= entry["orthogonium QR"] for entry in smaller)
    assert all(abs(e["orthogonium Cholesky"] / e["cholesky"] - 1) < 0.2 for e in (*smaller, largest))
    errors = {name: dict(zip(orthogonalizers.CONDITIONS, row, strict=True)) for name, row in data["errors"].items()}
    assert errors["orthogonium Cholesky"][100.0] == pytest.approx(0.05, abs=0.005)
    assert max(max(errors[f"orthogonium {way}"].values()) for way in ("QR", "exponential")) < 1e-6


def test_shares_are_quotients_of_medians_since_single_turns_are_noise():
    rows = {"Conv2d": [1.0, 5.9, 1.0], "AOC": [1.5, 1.5, 1.5], "orthogonium AOC": [6.0, 6.0, 6.0]}
    assert overhead.share({name: {"train": s} for name, s in rows.items()}, "orthogonium AOC") == pytest.approx(0.1)


def test_missing_results_and_quick_runs_are_said_so(tmp_path):
    quick = {**FOUND["kernels"], "quick": True, "missing": ["orthogonium is not installed"]}
    text = render({"kernels": quick})
    assert "Missing: orthogonium is not installed." in text
    assert "A quick run" in text
    assert "**Where the peer is better.**" not in text  # that is about the committed results
    assert "Not measured yet: `python -m benchmarks scaling`." in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not a result"),
        ('{"data": 1}', "it has no command, line"),
        (json.dumps({**FOUND["kernels"], "data": {"square": []}}), "the result of kernels is damaged or old"),
    ],
)
def test_damaged_results_are_named_and_the_page_stays(tmp_path, capsys, content, reason):
    (tmp_path / "page.md").write_text("old")
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(SystemExit):
        main(["page", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert reason in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == "old"


def test_a_figure_is_small_readable_and_the_same_each_time(tmp_path):
    figure = Figure(Plot({"one": {1: 3.0, 2: 4.0}, "two": {1: 5.0}}, "some x", "some y", "xy"))
    for name in "ab":
        figure.save(tmp_path / name / "figure.svg")
    text = (tmp_path / "a" / "figure.svg").read_text()
    assert text == (tmp_path / "b" / "figure.svg").read_text()
    assert all(re.search(f">{label}<", text) for label in ("one", "two", "some x", "some y"))
    assert "fill: #ffffff" in text  # the background, on dark pages too


def test_a_command_writes_what_it_prints(tmp_path, capsys):
    main(["counts", "--out", str(tmp_path / "counts.json")])
    written = results.read(tmp_path)["counts"]
    assert written["line"] == "python -m benchmarks counts"
    assert written["machine"].keys() == {"cpu", "cores", "memory_gb", "system"}
    assert question("counts").describe(written["data"])[0].text() in capsys.readouterr().out


def test_places_of_files_are_not_part_of_a_result():
    line = ["recipe", "--data", "/home/me", "--out=x.json", "--budget", "3"]
    shown = results.record("recipe", line, False, [], {})["line"]
    assert shown == "python -m benchmarks recipe --data DIR --budget 3"


@pytest.mark.parametrize(
    "line",
    [
        ["counts", "--threads", "0"],
        ["overhead", "--rounds", "many"],
        ["methods", "--data", "/no/such/folder", "--out", "x.json"],
        ["counts", "--out", "/proc/nothing/x.json"],
        ["counts", "--out", "/"],
    ],
)
def test_what_no_run_can_do_is_refused_before_it_starts(line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refused:
        main(line)
    assert refused.value.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_quick_run_makes_a_section_of_the_page(name, tmp_path):
    main([name, "--quick", "--out", str(tmp_path / f"{name}.json")])
    main(["page", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    section = (tmp_path / "page.md").read_text().split(f"## {QUESTIONS[name]}\n")[1].split("\n## ")[0]
    assert "A quick run" in section
    assert "| --- |" in section
