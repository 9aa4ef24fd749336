import json

import pytest
from benchmarks.__main__ import main
from benchmarks.commands import TITLES


@pytest.mark.slow
@pytest.mark.parametrize("name", TITLES)
def test_a_quick_run_makes_a_section_of_the_page(name, tmp_path):
    main([name, "--quick", "--out", str(tmp_path / f"{name}.json")])
    assert json.loads((tmp_path / f"{name}.json").read_text())["quick"]
    main(["page", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    section = (tmp_path / "page.md").read_text().split(f"## {TITLES[name]}\n")[1].split("\n## ")[0]
    assert "A quick run" in section
    assert "| --- |" in section
