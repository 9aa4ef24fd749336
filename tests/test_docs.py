"""What the documents quote holds: pages made by a program, errors, figures, files and links."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from benchmarks.overhead import ratios

import trysquare as ts
from benchmarks import measure

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["data"]


def tables(text):
    """Return the cells of all rows of the tables in a page."""
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("name", ["methods"])
def test_generated_page_is_up_to_date(name):
    path = DOCS / f"generate_{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    generator = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = generator
    spec.loader.exec_module(generator)
    assert generator.page() == (DOCS / f"{name}.md").read_text(), f"run python docs/generate_{name}.py"


def test_the_error_in_the_readme_is_the_one_that_is_raised():
    (call, quoted), *others = re.findall(r"`(ts\.[^`]*)` says\n\n```text\n(.*?)```", README, re.DOTALL)
    assert not others
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole text is compared
        eval(call, {"ts": ts})
    assert str(raised.value).split() == quoted.split()


def test_the_table_in_the_page_about_conversion_is_the_one_that_is_printed(capsys):
    text = (DOCS / "conversion.md").read_text()
    code, table = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.DOTALL).groups()
    exec(code, {"__name__": "document"})
    assert capsys.readouterr().out == table


def test_the_files_in_the_readme_are_those_of_the_package():
    package, door, listed = ROOT / "src" / "trysquare", "", set()
    for line in README.split("## Where things are")[1].split("```text\n")[1].split("```")[0].splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split(", ")
        door = door if line.startswith(" ") else ""
        listed |= {package / door / name for name in names}
        if names[0].rstrip("/") in ("nn", "verify", "lab"):
            door = names[0]
    there = [path for folder in ("nn", "verify", "lab", ".") for path in (package / folder).iterdir()]
    assert listed == {path for path in there if path.suffix in (".py", "") and not path.name.startswith("__")}


def test_the_speed_in_the_readme_is_that_of_the_committed_run():
    found = ratios(result("overhead"), "step")
    for row, name in zip(tables(README)[1:], ["AOC", "orthogonium AOC, QR", "orthogonium AOC"], strict=True):
        assert row[1:] == [f"{found[f'resnet34, 224 x 224, batch {batch}'][name]:.2f}" for batch in (8, 32)]


def test_the_kernels_on_the_page_of_speed_are_those_of_the_page_of_benchmarks():
    measured = [
        row for row in tables((DOCS / "benchmarks.md").read_text()) if row[1:2] in (["trysquare"], ["orthogonium"])
    ]
    values = {(row[0], row[1]): row[2:] for row in measured if len(row) == 7}
    rows = [row for row in tables((DOCS / "speed.md").read_text()) if "channels" in row[0]]
    assert rows
    for name, *cells, ratio in rows:
        channels, side = re.fullmatch(r"(\d+) channels, (\d)x\d", name).groups()
        ours, theirs = (values[f"{channels}, {side} x {side}", who] for who in ("trysquare", "orthogonium"))
        for cell, mine, other in zip(cells, ours, theirs, strict=False):
            quoted = re.fullmatch(r"([\d.]+) \(([\d.]+)\)", cell).groups()
            for text, value in zip(quoted, (mine, other), strict=True):
                digits = len(text.partition(".")[2])
                assert float(text) == pytest.approx(float(value), abs=0.501 * 10**-digits)
        assert float(ratio) == pytest.approx(float(theirs[-1].rstrip("x")), abs=0.0501)


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_kernels_in_the_readme_are_those_of_the_committed_run():
    data = result("kernels")
    alike = next(entry for entry in data["together"] if (entry["count"], entry["channels"]) == (8, 32))
    times = measure.ratio(alike["seconds"]["one by one"], alike["seconds"]["together"])
    said = " ".join(README.split())
    for calls, rest in (
        (alike["calls"], f"forward and backward, and 1/{times:.1f} of the time"),
        (data["accelerator"]["the 30 kernels of ResNet-34"], ""),
    ):
        assert f"{calls['together']:,} calls instead of {calls['one by one']:,}" in said
        assert rest in said


def test_every_page_is_linked_in_the_readme():
    assert {page.name for page in DOCS.glob("*.md")} <= set(re.findall(r"\(docs/([a-z-]+\.md)\)", README))
