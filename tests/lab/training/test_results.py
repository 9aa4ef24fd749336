import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

import trysquare as ts
from tests.lab.training.small import arguments, trained
from trysquare.lab.checkpoint import REGISTRY, encoded, read_checkpoint
from trysquare.lab.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    return trained(tmp_path_factory.mktemp("runs") / "run", **{"train.epochs": 15, "evaluate.every": 15})


def test_no_certified_digit_falls_inside_of_its_radius(run, capsys):
    assert main(["attack", str(run.path)]) == 0
    assert "certified <= attacked <= clean holds; no violation on 355 samples" in capsys.readouterr().out
    content = json.loads((run.path / "attack.json").read_text())
    assert content["attack"] == "pgd"
    assert content["violations"] == []
    assert content["certified"][0] > 0.2
    assert all(c <= a <= content["clean"] for c, a in zip(content["certified"], content["attacked"], strict=True))


def test_a_wrong_certificate_is_an_error(run, capsys, monkeypatch):
    monkeypatch.setattr("trysquare.verify.certification.analyse", _too_small)
    assert main(["attack", str(run.path), "--samples", "40"]) == 1
    printed = capsys.readouterr()
    assert "WRONG" in printed.out
    assert "fell inside of their radius" in printed.err


def _too_small(model, shape, **options):
    from dataclasses import replace

    from trysquare.verify.lipschitz import Analysis, analyse

    class Smaller(Analysis):
        head_weight = None
        features_bound = 0.1

    found = analyse(model, shape, **options)
    return Smaller(**{name: getattr(replace(found, bound=0.1), name) for name in ("bound", "graph", "walk", "gains")})


def test_autoattack_is_weaker_than_the_certificate(run, capsys, monkeypatch):
    from functools import partial

    from trysquare.lab.training import run as runs

    monkeypatch.setitem(runs.ATTACKS, "autoattack", partial(ts.attacks.autoattack_l2, attacks=["apgd-ce"]))
    arguments = ["attack", str(run.path), "--attack", "autoattack", "--samples", "20", "--epsilons", "0.25"]
    assert main(arguments) == 0
    assert json.loads((run.path / "attack.json").read_text())["attack"] == "autoattack"


def test_certify(run, capsys):
    assert main(["certify", str(run.path), "--samples", "50", "--epsilons", "36/255", "0.3"]) == 0
    out = capsys.readouterr().out
    assert "certified at 36/255" in out
    assert "certificate.json" in out
    certificate = ts.Certificate.from_json((run.path / "certificate.json").read_text())
    assert len(certificate.radii) == 50
    assert certificate.epsilons == (36 / 255, 0.3)


def test_files_name_the_weights_that_they_are_about(run, capsys, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run.path, folder)
    for command in ("certify", "attack", "audit", "report"):
        assert main([command, str(folder), *(["--samples", "20"] if command in ("certify", "attack") else [])]) == 0
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    for name in ("certificate", "attack", "audit"):
        assert json.loads((folder / f"{name}.json").read_text())["model_sha256"] == digest
    assert "of other weights" not in (folder / "report.html").read_text()
    assert main(["train", "--resume", str(folder), "--train.epochs", str(run.recipe.train.epochs + 1)]) == 0
    assert main(["audit", str(folder)]) == 0
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert [name for name in ("certificate", "attack", "audit") if f"The {name} is of other weights" in page] == [
        "certificate",
        "attack",
    ]


def test_audit(run, capsys):
    assert main(["audit", str(run.path)]) == 0
    assert "orthogonal" in capsys.readouterr().out
    assert json.loads((run.path / "audit.json").read_text())["layers"][0]["spectrum"]
    assert main(["audit", str(run.path), "--no-spectra"]) == 0
    assert not json.loads((run.path / "audit.json").read_text())["layers"][0]["spectrum"]


def test_a_model_that_is_not_the_recipes_is_refused(run, tmp_path, capsys):
    folder, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(run.path, folder)
    trained(other, **{"train.epochs": 1, "model.std": 0.5})
    shutil.copy(other / "model.safetensors", folder)
    for command in ("certify", "attack", "audit", "export"):
        assert main([command, str(folder)]) == 1
        assert (
            "model.safetensors is of another model: it has {'std': 0.5}, the recipe has {'std': None}"
            in capsys.readouterr().err
        )


ALONE = """
import sys, torch
program = torch.export.load(sys.argv[1]).module()
images, wanted = torch.load(sys.argv[2])
assert (program(images) - wanted).abs().max() < 1e-5
assert not any(name.startswith("trysquare") for name in sys.modules)
"""


def test_the_exported_file_runs_without_this_library(run, capsys, tmp_path):
    assert main(["export", str(run.path)]) == 0
    path, compared = capsys.readouterr().out.splitlines()
    assert "differ by at most" in compared
    images = torch.rand(3, 1, 8, 8)
    torch.save((images, run.model()(images).detach()), tmp_path / "wanted.pt")
    command = [sys.executable, "-I", "-c", ALONE, path, str(tmp_path / "wanted.pt")]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0


def test_onnx(run, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", str(run.path), "--format", "onnx"]) == 0
    session = onnxruntime.InferenceSession(str(run.path / "export" / "model.onnx"))
    images = torch.rand(5, 1, 8, 8)
    (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    assert (torch.from_numpy(found) - run.model()(images).detach()).abs().max() < 1e-5


def test_train_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), *arguments(**{"train.epochs": 1})]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert main(["train", "--resume", str(out), "--train.epochs", "2"]) == 0
    assert len(ts.training.load_run(out).metrics()) == 4


def test_recipes_are_listed(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ts.training.recipes())
    assert lines[0].startswith("cifar10-accurate ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --train.epoch 3", "did you mean 'epochs'"),
        ("train nothing", "unknown recipe"),
        ("train digits --resume RUN", "leave out RECIPE"),
        ("train --resume nowhere", "there is no recipe.yaml"),
        ("train --out RUN", "is not empty"),
        ("train mnist --data.root RUN", "expected train-images-idx3-ubyte"),
        ("train --model.dense_width 7", "7 channels cannot be sorted in pairs"),
        ("certify RUN --samples 1000", "samples=1000 must be from 1 to 355"),
        ("certify nowhere", "there is no recipe.yaml"),
        ("audit RUN/recipe.yaml --input-shape 1,8,8", "damaged, or not a checkpoint"),
        ("audit RUN/export --input-shape 1,8,8", "model.safetensors does not exist"),
        (
            "export RUN --data.name mnist",
            "export does not take --data.name; what it takes: --data.root, --data.workers",
        ),
        ("certify RUN --model.name resnet34", "certify does not take --model.name; what it takes: --data.root, "),
        ("attack RUN --evaluate.epsilons [1]", "attack does not take --evaluate.epsilons; "),
        ("audit RUN --train.epochs 3", "audit does not take --train.epochs; "),
        (
            "audit RUN --input-shape 1,8,8 --data.root x",
            "audit with --input-shape does not take --data.root; it takes none",
        ),
        ("report RUN --data.rot x", "report does not take --data.rot; what it takes: --data.root"),
        ("recipes --train.epochs 3", "recipes does not take --train.epochs; it takes none"),
    ],
)
def test_errors_are_one_line(run, tmp_path, capsys, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    (run.path / "export").mkdir(exist_ok=True)
    assert main(command.replace("RUN", str(run.path)).split()) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_stopped_run_has_an_exit_code_of_its_own(capsys, monkeypatch):
    def stop(*_):
        raise ts.training.StoppedError("stopped")

    monkeypatch.setattr(ts.training, "train", stop)
    assert main(["train"]) == 130


def test_a_model_of_another_run(run, tmp_path, capsys):
    other = trained(tmp_path / "other", **{"train.epochs": 1})
    content = read_checkpoint(other.path / "model.safetensors")
    arguments = {**content["arguments"], "dense_width": 32}
    (other.path / "model.safetensors").write_bytes(encoded(other.model(), REGISTRY, arguments))
    assert main(["certify", str(other.path)]) == 1
    assert "is of another model: it has {" in capsys.readouterr().err


def test_data_that_has_moved(run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run.path, folder)
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("name: digits\n  root: null", "name: mnist\n  root: /nowhere"))
    assert main(["certify", str(folder), "--data.root", str(tmp_path / "2024")]) == 1
    assert "2024 is not a folder" in capsys.readouterr().err
    batches = ["--data.workers", "0", "--evaluate.batch_size", "7"]
    assert main(["certify", str(run.path), "--samples", "20", *batches]) == 0


COMMANDS = {
    "certify": ("certificate.json", "trysquare.lab.training.run.certify"),
    "attack": ("attack.json", "trysquare.lab.training.run.certify"),
    "audit": ("audit.json", "trysquare.lab.training.run.audit"),
    "export": ("export/model.pt2", "trysquare.lab.training.run.export"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_written_is_found_before_the_work(run, tmp_path, capsys, monkeypatch, command):
    name, work = COMMANDS[command]
    folder = tmp_path / "run"
    shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns(name.split("/")[0]))
    (folder / name).mkdir(parents=True)
    monkeypatch.setattr(work, lambda *_, **__: pytest.fail("too late"))
    assert main([command, str(folder)]) == 1
    assert f"cannot write {folder / name}: it is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "numbers"), [("certify", "certified at"), ("attack", "no violation"), ("audit", "orthogonal")]
)
def test_a_disk_that_is_full_in_the_end_takes_no_numbers_away(run, capsys, monkeypatch, command, numbers):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main([command, str(run.path), *(["--samples", "10"] if command != "audit" else [])]) == 1
    printed = capsys.readouterr()
    assert numbers in printed.out
    assert "written to" not in printed.out
    assert "No space left on device" in printed.err


def test_wrong_radii(run, capsys):
    with pytest.raises(SystemExit):
        main(["certify", str(run.path), "--epsilons", "far"])
    assert "such as 0.5 or 36/255" in capsys.readouterr().err


def test_an_export_that_differs_is_not_written(run, tmp_path, monkeypatch):
    from trysquare.nn import export

    with pytest.raises(ValueError, match="format 'tflite' must be one of 'torch', 'onnx'"):
        export.export(run.model(), tmp_path / "file", torch.rand(2, 1, 8, 8), "tflite")
    monkeypatch.setattr(export, "_as_program", lambda model, example: (b"", lambda images: model(images) + 1e-3))
    with pytest.raises(ValueError, match=r"differs by 1.0e-03"):
        export.export(run.model(), tmp_path / "file", torch.rand(2, 1, 8, 8))
    assert not (tmp_path / "file").exists()


def test_onnx_needs_its_packages(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", str(run.path), "--format", "onnx"]) == 1
    assert "trysquare[export]" in capsys.readouterr().err


def test_the_commands_of_the_readme(tmp_path, monkeypatch, capsys):
    from pathlib import Path

    text = (Path(__file__).parents[3] / "README.md").read_text()
    lines = text.split("## Train, certify, attack")[1].split("```sh\n")[1].split("```")[0].splitlines()
    shorter = {"train": ["--train.epochs", "1"], "attack": ["--samples", "5"]}
    monkeypatch.chdir(tmp_path)
    for line in lines:
        _, command, *arguments = line.split()
        assert main([command, *arguments, *shorter.get(command, [])]) == 0
    assert {path.name for path in (tmp_path / "runs" / "first").iterdir()} >= {
        "certificate.json",
        "attack.json",
        "audit.json",
        "report.html",
        "export",
    }
