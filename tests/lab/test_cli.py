import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from torch import nn

import trysquare as ts
from trysquare.files import replacing
from trysquare.lab.checkpoint import encoded
from trysquare.lab.cli import main


def small(width=4):
    return nn.Sequential(ts.OrthoConv2d(3, width, 3), nn.ReLU())


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    (tmp_path / "somebodys_model.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())\n\n"
        "number = lambda: 3\n\ndef broken():\n    raise RuntimeError('no such\\ndevice')\n\n"
        "def missing():\n    return {}['width']\n\ndef interrupted():\n    raise KeyboardInterrupt\n"
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
    ts.save_checkpoint(path, model, "tests.lab.test_cli:small", {"width": 5})
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]
    with pytest.raises(ValueError, match="is not run"):
        ts.load_model(path)
    for factory in (small, "tests.lab.test_cli:small"):
        loaded = ts.load_model(path, factory=factory)
        assert not loaded.training
        torch.testing.assert_close(loaded[0].weight, model[0].weight)
    assert main(["audit", str(path), "--input-shape", "3,8,8"]) == 1
    assert "--factory tests.lab.test_cli:small" in capsys.readouterr().err
    assert main(["audit", str(path), "--input-shape", "3,8,8", "--factory", "tests.lab.test_cli:small"]) == 0
    assert "orthogonal" in capsys.readouterr().out


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        ts.save_checkpoint(path, small(), "tests.lab.test_cli:small")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


def test_errors_are_one_line(elsewhere, capsys):
    (elsewhere / "text.pt").write_text("not a checkpoint")
    torch.save({"weights": 1}, elsewhere / "other.pt")
    (elsewhere / "unfinished.py").write_text("def build(:\n")
    (elsewhere / "empty.pt").touch()
    (elsewhere / "misfit.pt").write_bytes(encoded(small(6), "tests.lab.test_cli:small", {"width": 4}))
    (elsewhere / "cut.pt").write_bytes((elsewhere / "misfit.pt").read_bytes()[:600])
    torch.save({"factory": 3, "arguments": {}, "state_dict": {}}, elsewhere / "three.pt")
    for model, message in (
        ("somebodys_model:absent", "cannot import"),
        ("no_such_module:build", "cannot import"),
        ("somebodys_model:number", "not an nn.Module"),
        ("nothing.pt", "package.module:factory"),
        ("text.pt", "damaged, or not a checkpoint"),
        ("other.pt", "save_checkpoint"),
        ("empty.pt", "damaged, or not a checkpoint"),
        ("cut.pt", "damaged, or not a checkpoint"),
        ("three.pt", "factory=3, which must be a str"),
        ("misfit.pt", "what a file names is not run"),
        ("somebodys_model:broken", "'somebodys_model:broken' failed: RuntimeError: no such device"),
        ("somebodys_model:missing", "'somebodys_model:missing' failed: KeyError: 'width'"),
        ("unfinished:build", "cannot import 'unfinished:build': SyntaxError"),
        ("./somebodys_model.py:build", "name the module: somebodys_model:build"),
        ("models/resnet.py:build", "name the module: models.resnet:build"),
        (f"{elsewhere}/somebodys_model.py:build", "in the folder"),
    ):
        assert main(["audit", model, "--input-shape", "3,8,8"]) == 1
        shown = capsys.readouterr().err
        assert message in shown
        assert shown.count("\n") == 1
    assert main(["audit", "somebodys_model:build", "--input-shape", "4,8,8"]) == 1
    shown = capsys.readouterr().err
    assert "Conv2d at '0' does not accept an input of shape (4, 8, 8)" in shown
    assert "Conv2d: input_shape=(4, 8, 8) must be (3 channels, and 2 sizes)" in shown
    assert main(["audit", "somebodys_model:interrupted", "--input-shape", "3,8,8"]) == 130
    assert capsys.readouterr().err == "trysquare: interrupted\n"
    with pytest.raises(SystemExit):
        main(["audit", "somebodys_model:build", "--input-shape", "3,a"])
    assert "such as 3,32,32" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["somebodys_model:build", "model.pt"])
def test_audit_asks_for_the_shape_that_only_a_run_knows(model, capsys):
    assert main(["audit", model]) == 1
    assert f"{model} is not the directory of a run: say the shape of its inputs" in capsys.readouterr().err


def test_files_that_cannot_be_written_are_found_before_the_work(elsewhere, capsys, monkeypatch):
    monkeypatch.setattr("trysquare.lab.cli.load_model", lambda *_: pytest.fail("too late"))
    (elsewhere / "folder.json").mkdir()
    for option, path, message in (
        ("--json", "nowhere/report.json", "cannot write nowhere/report.json: No such file or directory"),
        ("--json", "folder.json", "it is a folder"),
        ("--plot", "nowhere/spectra.png", "cannot write"),
        ("--plot", "spectra.abc", ", png, "),
        ("--plot", "spectra", ", png, "),
    ):
        assert main(["audit", "somebodys_model:build", "--input-shape", "3,8,8", option, path]) == 1
        assert message in capsys.readouterr().err


def test_an_error_while_a_file_is_written_leaves_the_old_one(elsewhere):
    (elsewhere / "report.json").write_text("old")
    with suppress(KeyboardInterrupt), replacing(elsewhere / "report.json") as file:
        file.write(b"half of")
        raise KeyboardInterrupt
    assert (elsewhere / "report.json").read_text() == "old"
    with replacing(elsewhere / "report.json") as file:
        file.write(b"new")
    assert (elsewhere / "report.json").read_text() == "new"
    assert {path.name for path in elsewhere.iterdir()} == {"somebodys_model.py", "report.json"}
    with replacing(os.devnull) as file:
        file.write(b"nothing")


def test_the_package_runs_as_a_program(elsewhere):
    command = [sys.executable, "-m", "trysquare", "audit", "somebodys_model:build", "--input-shape", "3,8,8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Conv2d" in done.stdout


def test_missing_extras_say_what_to_install(elsewhere, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["audit", "somebodys_model:build", "--input-shape", "3,8,8", "--plot", "spectra.png"]) == 1
    assert "trysquare[plot]" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["audit", "somebodys_model:build", "--input-shape", "3,8,8"]) == 0
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["audit", "somebodys_model:build", "--input-shape", "3,8,8"]) == 0
