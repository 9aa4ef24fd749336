"""The examples of the gallery, in their quick form: what they show holds, and the page is what they wrote."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def figures(tmp_path):
    def of(name):
        found = loaded(ROOT / "examples" / f"{name}.py").main(["--quick", "--out", str(tmp_path)])
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        return found

    return of


def test_robust_sets_keep_their_coverage_and_others_do_not(figures):
    found = figures("certified_conformal")
    assert all(row["robust"] >= 0.87 for row in found.values())  # of 178 images; 90 % are promised
    assert found[0.5]["usual"] < 0.8
    assert found[0.5]["plain"] < 0.8
    assert found[0.0]["robust size"] < 1.2


def test_a_learned_distance_is_never_too_large(figures):
    found = figures("distance_field")
    ours, plain = found.values()
    assert ours["bound"] < 1 + 1e-4
    assert ours["overestimate"] == 0
    assert ours["jumps"] == 0
    assert plain["overestimate"] > 0.005
    assert plain["slope"] > 1.05


def test_orthogonal_critics_find_most_of_a_known_distance(figures):
    found = figures("wasserstein")
    assert max(found.values()) < 1.05  # more than all is noise of the sample
    assert found["AOC, MaxMin"] > 0.95
    assert found["AOC, MaxMin"] > found["spectral_norm, ReLU"]


def test_deep_orthogonal_networks_train_from_the_start(figures):
    found = figures("very_deep")
    ours, torchs, he, start = found.values()
    assert abs(ours["ratio"] - 1) < 1e-2
    assert abs(start["ratio"] - 1) < 1e-2
    assert not 0.5 < he["ratio"] < 2
    assert ours["accuracy"] > 0.5 > max(torchs["accuracy"], he["accuracy"])


def test_the_page_is_what_the_examples_wrote():
    assert loaded(ROOT / "docs" / "generate_gallery.py").page() == (ROOT / "docs" / "gallery.md").read_text()
