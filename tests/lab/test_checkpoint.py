"""Models on disk: what a file may do when it is read, and what damage is seen."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trysquare as ts
from trysquare.lab.checkpoint import encoded, packed, read_checkpoint, unpacked

ARGUMENTS = {"name": "tiny-digits", "input_shape": (1, 8, 8), "classes": 10}


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    ts.save_checkpoint(
        tmp_path / "model.safetensors", ts.models.build(**ARGUMENTS), "trysquare.models:build", ARGUMENTS
    )
    return tmp_path / "model.safetensors"


def test_round_trip(path):
    model = ts.load_model(path)
    content = read_checkpoint(path)
    assert content["arguments"] == ARGUMENTS
    assert isinstance(content["arguments"]["input_shape"], tuple)
    assert content["parameters"] == sum(p.numel() for p in model.parameters())
    from safetensors.torch import load_file

    assert load_file(path).keys() == model.state_dict().keys()


def test_every_flipped_bit_is_seen(path):
    whole = path.read_bytes()
    dice = random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [
        *range(8 * 8),
        *(dice.randrange(8 * header) for _ in range(150)),
        *(dice.randrange(8 * len(whole)) for _ in range(100)),
    ]
    for place in places:
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            read_checkpoint(path)
    for size in (0, 7, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            read_checkpoint(path)


def test_every_flipped_bit_of_a_state_is_seen(tmp_path):
    path = tmp_path / "checkpoint.pt"
    whole = packed({"a": torch.arange(5.0), "b": {"c": 1}})
    path.write_bytes(whole)
    assert unpacked(path)["b"] == {"c": 1}
    dice = random.Random(0)
    for place in [*range(8 * 40), *(dice.randrange(8 * len(whole)) for _ in range(200))]:
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"checkpoint\.pt"):
            unpacked(path)


def test_reading_runs_nothing_that_a_file_names(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\ndef build(): raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").write_bytes(encoded(nn.Linear(2, 2), "evil:build"))
    for source in ("model.safetensors", "."):
        with pytest.raises(ValueError, match="not run"):
            ts.load_model(source)
    torch.save({"factory": "evil:build", "arguments": {}, "state_dict": {}}, "old.pt")
    with pytest.raises(ValueError, match="not run"):
        ts.load_model("old.pt")
    assert not (tmp_path / "ran").exists()


def test_older_files_still_load(tmp_path):
    model = ts.models.build(**ARGUMENTS)
    content = {"factory": "trysquare.models:build", "arguments": ARGUMENTS, "state_dict": model.state_dict()}
    torch.save(content, tmp_path / "model.pt")
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(ts.load_model(tmp_path)(x), model.eval()(x))


def test_what_cannot_be_written_is_said_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"package\.module:function"):
        ts.save_checkpoint(tmp_path / "a", nn.Linear(2, 2), "linear")
    with pytest.raises(ValueError, match="plain types"):
        ts.save_checkpoint(tmp_path / "a", nn.Linear(2, 2), "torch.nn:Linear", {"device": torch.device("cpu")})
    for factory, arguments, why in (
        ("torch.nn:Linear", {"in_features": 2}, "failed"),
        ("torch.nn:Linear", {"in_features": 2, "out_features": 3}, r"'weight'.*shape"),
        ("torch.nn:ReLU", {}, "the model has no"),
        ("torch.nn:Linnear", {}, "cannot import"),
        ("trysquare.models:build", ARGUMENTS, "is missing"),
    ):
        with pytest.raises(ValueError, match=f"nothing is saved.*{why}"):
            ts.save_checkpoint(tmp_path / "a", nn.Linear(2, 2), factory, arguments)
    with pytest.raises(ValueError, match="float64 in the file"):
        ts.save_checkpoint(
            tmp_path / "a", nn.Linear(2, 2).double(), "torch.nn:Linear", {"in_features": 2, "out_features": 2}
        )
    assert not list(tmp_path.iterdir())


def looks(width):
    """A factory that cannot do without numbers, and draws some."""
    layer = nn.Linear(width, width)
    return layer if layer.weight.sum().item() < 1e9 else nn.Identity()


def test_saving_draws_no_numbers_and_takes_factories_that_look_at_theirs(tmp_path):
    model, layer = ts.models.build(**ARGUMENTS), looks(3)
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    ts.save_checkpoint(tmp_path / "a", model, "trysquare.models:build", ARGUMENTS)
    ts.save_checkpoint(tmp_path / "b", layer, "tests.lab.test_checkpoint:looks", {"width": 3})
    assert torch.equal(torch.randn(3), expected)
    assert torch.equal(ts.load_model(tmp_path / "b", factory=looks).weight, layer.weight)


def test_links_that_lead_out_of_a_run_are_not_written_through(tmp_path):
    run = ts.training.train(ts.training.read_recipe("digits", {"train.epochs": 1}), tmp_path / "run", quiet=True)
    outside = tmp_path / "outside.json"
    outside.write_text("mine")
    (run.path / "certificate.json").symlink_to(outside)
    with pytest.raises(ValueError, match="symbolic link"):
        ts.training.certify_run(run, samples=5)
    assert outside.read_text() == "mine"


def test_one_process_at_a_time_trains_in_a_directory(tmp_path):
    run = ts.training.train(ts.training.read_recipe("digits", {"train.epochs": 1}), tmp_path / "run", quiet=True)
    script = "import sys, trysquare as ts; ts.training.resume(sys.argv[1], {'train.epochs': 2}, quiet=True)"
    with run.locked():
        with pytest.raises(ValueError, match="another process"), run.locked():
            pass
        found = subprocess.run([sys.executable, "-c", script, run.path], capture_output=True, text=True, check=False)
        assert "another process is training" in found.stderr
    assert json.loads((run.path / "versions.json").read_text())
    ts.training.resume(run.path, {"train.epochs": 2}, quiet=True)
