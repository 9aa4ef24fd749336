"""Pages that are made by a program are what the program makes."""

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["methods"])
def test_generated_page_is_up_to_date(name):
    path = DOCS / f"generate_{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    generator = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = generator
    spec.loader.exec_module(generator)
    assert generator.page() == (DOCS / f"{name}.md").read_text(), f"run python docs/generate_{name}.py"
