import json
import sys

import pytest
import torch
from torch import nn

import trysquare as ts
from trysquare.cli import main


def small(width=4):
    return nn.Sequential(ts.OrthoConv2d(3, width, 3), nn.ReLU())


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    (tmp_path / "somebodys_model.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())\n\n"
        "number = lambda: 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return tmp_path


def test_audit_of_an_importable_model(elsewhere, capsys):
    arguments = [
        "audit",
        "somebodys_model:build",
        "--input-shape",
        "3,8,8",
        "--json",
        "report.json",
        "--plot",
        "spectra.png",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "Conv2d" in printed.out
    assert printed.err == ""
    assert json.loads((elsewhere / "report.json").read_text())["layers"][0]["type"] == "Conv2d"
    assert (elsewhere / "spectra.png").exists()


def test_audit_of_a_checkpoint(tmp_path, capsys):
    model = small(5)
    path = tmp_path / "model.pt"
    ts.save_checkpoint(path, model, "tests.test_cli:small", {"width": 5})
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]
    loaded = ts.load_model(path)
    assert not loaded.training
    torch.testing.assert_close(loaded[0].weight, model[0].weight)
    assert main(["audit", str(path), "--input-shape", "3,8,8"]) == 0
    assert "orthogonal" in capsys.readouterr().out


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        ts.save_checkpoint(path, small(), "tests.test_cli:small")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


def test_errors_are_one_line(elsewhere, capsys):
    (elsewhere / "text.pt").write_text("not a checkpoint")
    torch.save({"weights": 1}, elsewhere / "other.pt")
    for model, message in (
        ("somebodys_model:missing", "cannot import"),
        ("no_such_module:build", "cannot import"),
        ("somebodys_model:number", "not an nn.Module"),
        ("nothing.pt", "package.module:factory"),
        ("text.pt", "not a checkpoint"),
        ("other.pt", "save_checkpoint"),
    ):
        assert main(["audit", model, "--input-shape", "3,8,8"]) == 1
        assert message in capsys.readouterr().err
    assert main(["audit", "somebodys_model:build", "--input-shape", "4,8,8"]) == 1
    assert "does not accept an input of shape (4, 8, 8)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["audit", "somebodys_model:build", "--input-shape", "3,a"])
    assert "such as 3,32,32" in capsys.readouterr().err


def test_missing_extras_say_what_to_install(elsewhere, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["audit", "somebodys_model:build", "--input-shape", "3,8,8", "--plot", "spectra.png"]) == 1
    assert "trysquare[plot]" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["audit", "somebodys_model:build", "--input-shape", "3,8,8"]) == 0
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["audit", "somebodys_model:build", "--input-shape", "3,8,8"]) == 0
