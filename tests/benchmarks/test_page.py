import json
import re
import sys

import pytest
from benchmarks.__main__ import main
from benchmarks.commands import TITLES, command
from benchmarks.report import Plot, Table, better_peer, to_text

from benchmarks import page, results
from tests.benchmarks.synthetic import DATA, overhead, result


def test_every_command_has_a_synthetic_result():
    assert DATA.keys() == TITLES.keys()


@pytest.mark.parametrize("name", TITLES)
def test_section_has_its_command_machine_and_tables(name):
    text = page.render({name: result(name)})
    assert f"`python -m benchmarks {name} --flag` on 2026-01-02 03:04 UTC: A CPU, 2 cores, 8.0 GB, 2 threads" in text
    tables = [part for part in command(name).describe(DATA[name]()) if isinstance(part, Table)]
    assert tables
    assert all(table.markdown() in text for table in tables)
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert f"Not measured yet: `python -m benchmarks {name}`." not in text


def test_missing_results_are_said_so():
    text = page.render({})
    assert all(f"Not measured yet: `python -m benchmarks {name}`." in text for name in TITLES)
    assert "no peer took part" in text


def test_missing_peers_and_quick_runs_are_said_so():
    text = page.render({"counts": {**result("counts"), "quick": True, "missing": ["einops is not installed"]}})
    assert "A quick run" in text
    assert "Missing: einops is not installed." in text


@pytest.mark.parametrize(
    ("name", "wins"),
    [
        ("overhead", ["SOC of orthogonium runs, ours: not ready after 1 s"]),
        ("orthogonalizers", ["matrix 1 x 8 x 8: Björck-Bowie of orthogonium takes 3 ms, ours 4 ms (1.33x, 1 turn)",
                             "trained for up to 2 steps, accuracy: orthogonium Björck-Bowie 60.0%, cholesky 50.0%"]),
        ("scaling", ["kernel, channels 16: AOC of orthogonium takes 100000 ms, ours 256000 ms (2.56x, 1 turn)"]),
        ("methods", ["trained for the same time, certified at 36/255: orthogonium aoc 45.0%, aoc 40.0%"]),
        ("recipe", ["by the recipe digits, certified at 36/255: orthogonium 45.0%, trysquare 40.0%"]),
        ("kernels", ["kernel of 2 channels, 3 x 3: AOC of orthogonium takes 1 ms, ours 2 ms (2.00x, 1 turn)"]),
        ("spectrum", ["norm of conv"]),
    ],
)  # fmt: skip
def test_peers_that_are_better_are_found_in_the_data(name, wins):
    found = command(name).peer_wins(DATA[name]())
    assert len(found) == len(wins)
    assert all(win in line for win, line in zip(wins, found, strict=True))
    assert all(f"* {line}" in page.render({name: result(name)}) for line in found)


def test_a_library_that_breaks_is_said_so():
    data = DATA["recipe"]()
    data["rows"]["orthogonium"] = {"error": "the loss of step 2 is nan"}
    assert "* orthogonium: the loss of step 2 is nan" in to_text(command("recipe").describe(data))
    assert not command("recipe").peer_wins(data)


def test_a_case_without_its_reference_has_no_table():
    data = overhead()
    data["resnet34"][0]["rows"]["Conv2d"] = {"error": "needs more than 1 GB of memory"}
    found = command("overhead").describe(data)
    assert not any(isinstance(part, Table) for part in found)
    assert "* Conv2d: needs more than 1 GB of memory" in to_text(found)
    command("overhead").peer_wins(data)


def test_adaptive_soc_of_the_peer_is_compared_with_ours_of_as_many_terms():
    data = overhead()
    rows = data["resnet34"][0]["rows"]
    rows["SOC, 3 terms"], rows["orthogonium adaptive SOC"] = rows["orthogonium AOC"], rows["AOC"]
    wins = command("overhead").peer_wins(data)
    assert any(
        "training step: adaptive SOC of orthogonium takes 1.5 s, ours (SOC, 3 terms) 6 s (4.00x, 3 turns)." in win
        for win in wins
    )
    assert any("peak memory of evaluation: adaptive SOC" in win for win in wins)


def test_a_way_that_diverges_is_said_so():
    data = DATA["orthogonalizers"]()
    data["training"]["runs"]["bjorck"] = {"error": "the loss of step 2 is nan"}
    assert "* bjorck: the loss of step 2 is nan" in to_text(command("orthogonalizers").describe(data))


def test_a_slower_evaluation_is_a_win_of_the_peer():
    assert any("evaluation: AOC of orthogonium" in win for win in command("overhead").peer_wins(overhead(aoc_eval=3.0)))


def test_noise_is_no_win():
    def wins(ours, theirs):
        return better_peer("step", "AOC", "ms", 1e3, ours, theirs)

    assert not wins([1.01], [1.0])
    assert wins([1.1], [1.0]) == ["step: AOC of orthogonium takes 1000 ms, ours 1100 ms (1.10x, 1 turn)."]
    assert not wins([1.1, 1.1, 1.1, 0.9, 0.9], [1.0] * 5)
    assert wins([1.1, 1.1, 1.1, 1.1, 0.9], [1.0] * 5)


def test_a_win_is_told_by_the_turns_that_both_have():
    told = better_peer("peak", "AOC", "MB", 1.0, [833.0, 766.0, 821.0], [814.0])
    assert told == ["peak: AOC of orthogonium takes 814 MB, ours 833 MB (1.02x, 1 turn)."]


def test_targets_stand_next_to_what_was_measured():
    *_, targets = command("overhead").describe(overhead(aoc_eval=1.1))
    verdicts = {row[0].split(": ")[1]: row[1:] for row in targets.rows}
    assert verdicts["share of orthogonium's added time"] == ["0.167", "0.100", "3", "0.100 to 0.100", "yes", ""]
    assert verdicts["training step"] == ["1.600", "1.500", "3", "1.500 to 1.500", "yes", ""]
    assert verdicts["evaluation"] == ["1.020", "1.100", "3", "1.100 to 1.100", "**no**", ""]
    assert verdicts["peak memory of training"] == ["1.050", "1.040", "3", "1.027 to 1.050", "yes", ""]


def test_kernels_have_a_share_of_their_own():
    data = overhead()
    rows = data["resnet34"][0]["rows"]
    rows["Conv2d, our padding"] = {**rows["Conv2d"], "train": [0.5] * 3}
    *_, targets = command("overhead").describe(data)
    assert {row[0].split(": ")[1]: row[2] for row in targets.rows if "share" in row[0]} == {
        "share of orthogonium's added time": "0.100",
        "share of orthogonium's added time, kernels alone": "0.200",
    }


def test_shares_are_told_for_every_orthogonalizer_of_the_peer():
    data = overhead()
    rows = data["resnet34"][0]["rows"]
    rows["orthogonium AOC, QR"] = {**rows["orthogonium AOC"], "train": [3.0] * 3}
    *_, targets = command("overhead").describe(data)
    assert {row[0].split(": ")[1]: row[2::3] for row in targets.rows if "share" in row[0]} == {
        "share of orthogonium's added time": ["0.100", "yes"],
        "share of orthogonium's added time, QR": ["0.250", "**no**"],
    }
    assert "**" not in targets.text()


def test_a_machine_that_became_slower_is_seen():
    table = next(
        part for part in command("methods").describe(DATA["methods"]()) if "method" in getattr(part, "columns", ())
    )
    assert table.rows[0][3] == "1000 to 2000"


def test_noise_and_operations_stand_next_to_the_verdict():
    data = overhead()
    rows = data["resnet34"][0]["rows"]
    rows["Conv2d, our padding"] = {**rows["Conv2d"], "eval": [1.0, 1.01, 1.03]}
    for name, calls in (("Conv2d", 7), ("AOC", 8)):
        rows[name]["operations"] = {"calls": calls, "flops": 2_000_000}
    *parts, targets = command("overhead").describe(data)
    assert next(row for row in targets.rows if "evaluation" in row[0])[-1] == "1.010"
    assert "Operations of torch in an evaluation: 7 with Conv2d (0.002 GFLOPs), 8 with AOC (0.002 GFLOPs)." in parts


def test_a_share_is_that_of_medians_since_single_turns_are_noise():
    data = overhead()
    rows = data["resnet34"][0]["rows"]
    rows["Conv2d"]["train"] = [1.0, 5.9, 1.0]
    *_, targets = command("overhead").describe(data)
    share = next(row for row in targets.rows if "share" in row[0])
    assert share[2:5] == ["0.100", "3", "-44.000 to 0.100"]


def test_evaluation_and_memory_have_targets_in_every_network():
    data = overhead(aoc_eval=1.1)
    data["resnet34"][0]["network"] = "depthwise"
    *_, targets = command("overhead").describe(data)
    assert [row[0].split(": ")[1] for row in targets.rows][1:] == ["evaluation", "peak memory of training"]


def test_a_peak_after_few_steps_is_said_so():
    data = overhead()
    for sample in data["resnet34"][0]["rows"]["orthogonium SOC"]["memory_train"]:
        sample["passes"] = 1
    assert "Peak memory is that of fewer than 3 steps: orthogonium SOC 1." in command("overhead").describe(data)


def test_what_only_the_peer_can_train_or_evaluate_is_its_win():
    data = overhead()
    data["resnet34"][0]["rows"]["AOC"]["eval_error"] = "not ready after 2 s"
    wins = command("overhead").peer_wins(data)
    assert "resnet34, 224 x 224, batch 8: AOC of orthogonium runs, ours: not ready after 2 s." in wins
    trained = DATA["methods"]()
    trained["accuracy"]["rows"]["aoc"] = {"error": "no memory"}
    assert "trained for the same time: orthogonium aoc 50.0%, aoc: no memory." in command("methods").peer_wins(trained)


def test_exponents_are_shown_where_there_is_a_power():
    text = to_text(command("scaling").describe(DATA["scaling"]()))
    assert "-1.00 (R² 1.00)" in text
    data = DATA["scaling"]()
    data["kernels"]["channels"][1]["seconds"]["trysquare"] = [1000.0]
    assert "none (R² 0." in to_text(command("scaling").describe(data))


def test_an_overhead_within_noise_is_no_place_to_fit_a_power():
    data = DATA["scaling"]()
    data["overhead"]["batch"][2]["seconds"]["AOC"] = [8.1]
    assert "too few" in to_text(command("scaling").describe(data))


def test_page_and_figures_are_written(tmp_path):
    for name in TITLES:
        results.write(result(name), tmp_path / "results" / f"{name}.json")
    main(["page", "--results", str(tmp_path / "results"), "--page", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    linked = set(re.findall(r"\((figures/.*?)\)", text))
    assert linked
    assert linked == {f"figures/{path.name}" for path in (tmp_path / "figures").iterdir()}


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"command": "nope", "data": 1}', '{"data": 1}', '{"command": "counts", "data": {}}']
)
def test_damaged_results_are_named_and_the_page_stays(tmp_path, capsys, content):
    (tmp_path / "page.md").write_text("old")
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(SystemExit):
        main(["page", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert "bad.json is not a result" in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == "old"


def test_what_a_result_lacks_is_named(tmp_path):
    (tmp_path / "bad.json").write_text('{"data": 1}')
    with pytest.raises(ValueError, match=r"bad.json is not a result: it has no command, line, "):
        results.read_one(tmp_path / "bad.json")


def test_results_of_another_version_are_named(tmp_path, capsys):
    results.write({**result("kernels"), "data": {"square": []}}, tmp_path / "kernels.json")
    with pytest.raises(SystemExit):
        main(["page", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert (
        "of another version of the benchmark (KeyError: 'groups'): run python -m benchmarks kernels"
        in capsys.readouterr().err
    )


def test_a_time_of_nothing_is_named(tmp_path, capsys):
    data = DATA["overhead"]()
    data["resnet34"][0]["rows"]["Conv2d"]["train"][0] = 0.0
    results.write(result("overhead", data), tmp_path / "overhead.json")
    with pytest.raises(SystemExit):
        main(["page", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert "the result of overhead is damaged" in capsys.readouterr().err


def test_a_result_without_samples_is_named(tmp_path, capsys):
    data = DATA["scaling"]()
    data["kernels"]["channels"][0]["seconds"]["trysquare"] = []
    results.write(result("scaling", data), tmp_path / "scaling.json")
    with pytest.raises(SystemExit):
        main(["page", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert "the result of scaling is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("header", [{"machine": None}, {"machine": {}}, {"versions": []}, {"missing": None}])
def test_a_damaged_header_is_named(tmp_path, capsys, header):
    results.write({**result("kernels"), **header}, tmp_path / "kernels.json")
    with pytest.raises(SystemExit):
        main(["page", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert "the result of kernels is damaged" in capsys.readouterr().err


def test_a_page_needs_results_and_matplotlib(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        main(["page", "--results", str(tmp_path / "typo"), "--page", str(tmp_path / "page.md")])
    assert "there is no folder" in capsys.readouterr().err
    results.write(result("scaling"), tmp_path / "scaling.json")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["page", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert "pip install 'trysquare[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


@pytest.mark.parametrize(
    "line",
    [
        ["counts", "--threads", "0"],
        ["counts", "--threads", "100000"],
        ["overhead", "--rounds", "-1"],
        ["overhead", "--batches", "0"],
        ["overhead", "--batches", "64", "--networks", "depthwise", "--out", "x.json"],
        ["overhead", "--batches", "64"],
        ["overhead", "--quick", "--networks", "depthwise"],
        ["methods", "--budget", "-1"],
        ["methods", "--budget", "nan"],
        ["methods", "--data", "/no/such/folder"],
        ["orthogonalizers", "--steps", "0"],
        ["counts", "--out", "/proc/nothing/x.json"],
        ["counts", "--out", "/"],
        ["methods", "--only", "aoc"],
    ],
)
def test_what_no_run_can_do_is_refused_before_it_starts(line, monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for name in ("overhead", "methods"):
        (tmp_path / f"{name}.json").write_text("whole")
    for name in ("counts", "methods", "orthogonalizers"):
        monkeypatch.setattr(command(name), "plan", lambda arguments: lambda: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as refused:
        main(line)
    assert refused.value.code == 2


def test_a_stride_that_does_not_divide_the_map_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["methods", "--size", "15", "--out", str(tmp_path / "x.json")])
    assert "--size 15 must be even" in capsys.readouterr().err


def test_libraries_that_did_not_take_part_are_named():
    assert "Not part of this run: orthogonium, QR." in to_text(command("recipe").describe(DATA["recipe"]()))


def test_a_result_that_cannot_be_described_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(command("counts"), "plan", lambda arguments: {"odd": 1})
    with pytest.raises(TypeError):
        main(["counts", "--out", str(tmp_path / "counts.json")])
    assert json.loads((tmp_path / "counts.json").read_text())["data"] == {"odd": 1}


def test_a_plot_is_the_same_file_each_time(tmp_path):
    plot = Plot("p", "title", {"a": ([1, 2], [3.0, 4.0])}, "x", "y", log="xy")
    assert plot.save(tmp_path / "a").read_bytes() == plot.save(tmp_path / "b").read_bytes()


def test_committed_page_is_what_the_committed_results_make():
    found = results.read(results.FOLDER)
    assert page.PAGE.read_text() == page.render(found), "run python -m benchmarks page"
    figures = page.PAGE.parent / "figures"
    drawn = {plot.name for plot in page.plots(found)}
    sections = {name.split("-")[0] for name in drawn}
    committed = {path.stem for path in figures.glob("*.svg") if path.stem.split("-")[0] in sections}
    assert committed == drawn, "run python -m benchmarks page, and delete figures that are not on it"


def test_command_writes_what_it_prints(tmp_path, capsys):
    main(["counts", "--quick", "--out", str(tmp_path / "counts.json")])
    written = json.loads((tmp_path / "counts.json").read_text())
    assert written["line"].startswith("python -m benchmarks counts --quick")
    assert to_text(command("counts").describe(written["data"])) in capsys.readouterr().out
