"""Values, files and pipes of strangers: each ends at once, with one line."""

import os
import pickle
import struct
import subprocess
import sys
import zlib

import pytest
import torch

import trysquare as ts
from trysquare.lab.cli import main
from trysquare.lab.data.unpickle import read_pickled_dict

VALUES = {
    "an epsilon": ["--evaluate.epsilons", "[1e999999999]"],
    "a quotient": ["--evaluate.epsilons", '["1e999999999/3"]'],
    "a quotient by zero": ["--evaluate.epsilons", '["1/0"]'],
    "widths": ["--model.widths", str([16] * 500)],
    "a width": ["--model.dense_width", "100000000000"],
    "epochs": ["--train.epochs", "9" * 40],
    "a batch": ["--train.batch_size", "9" * 40],
    "nesting": ["--model.widths", "[" * 5000],
    "aliases": ["--model.widths", "&a [*a]"],
    "a learning rate": ["--optimizer.lr", "1e308"],
    "a decay": ["--optimizer.weight_decay", "1e308"],
    "a margin": ["--loss.radius", "1e308"],
    "threads": ["--data.workers", "1000000000"],
    "images": ["--data.size", "1000000000"],
    "many digits": ["--train.epochs", "9" * 5000],
    "many letters": ["--model.dense_width", "a" * 100_000],
    "a long word for a list": ["--model.widths", str(["a" * 1000] * 100)],
    "a long name of a model": ["--model.name", "a" * 100_000],
    "a long name of a key": [f"--model.{'a' * 100_000}", "1"],
    "a long name of a section": [f"--{'a' * 100_000}.b", "1"],
}


@pytest.mark.parametrize("name", VALUES)
def test_numbers_without_bounds_end_at_once(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", *VALUES[name]]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("trysquare: ")
    assert shown.count("\n") == 1
    assert len(shown) < 700
    assert not list(tmp_path.iterdir())


LONG = "a" * 100_000
ARGUMENTS = {
    "a large input": ["audit", "torch.nn:Identity", "--input-shape", "99999999999,9999999999"],
    "a large axis": ["audit", "torch.nn:Identity", "--input-shape", "9" * 5000],
    "many axes": ["audit", "torch.nn:Identity", "--input-shape", ",".join(["1"] * 501)],
    "a long shape": ["audit", "torch.nn:Identity", "--input-shape", LONG],
    "a long model": ["audit", LONG, "--input-shape", "3"],
    "a long factory": ["audit", f"{LONG}:{LONG}", "--input-shape", "3"],
    "a long run": ["certify", LONG],
    "a long recipe": ["train", LONG],
    "a long folder": ["train", "--out", LONG],
    "a long command": [LONG],
    "a mean of text": ("tiny-digits", {"mean": ["a"]}),
    "a mean by name": ("tiny-digits", {"mean": {"a": 1}}),
    "a long name": ("tiny-digits", {"conv": "a" * 100_000}),
    "a long mode": ("tiny-digits", {"padding_mode": "a" * 100_000}),
    "less than no layers": ("tiny-digits", {"dense_layers": -3}),
    "less than no blocks": ("resnet34", {"depths": [3, -3]}),
    "a long option": ["certify", "run", f"--{LONG}"],
    "a long radius": ["certify", "run", "--epsilons", LONG],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_not_quoted_whole(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(ARGUMENTS[name]))
    assert ended.value.code in (1, 2)
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("trysquare")
    assert len(last) < 700


def test_radii_of_the_command_line(capsys):
    for text in ("1e999999999", "nan", "-1", "1/0", "x"):
        with pytest.raises(SystemExit):
            main(["certify", "run", "--epsilons", text])
        assert "must be a radius" in capsys.readouterr().err


def test_recipes_that_refer_to_themselves(tmp_path, capsys):
    lines = ["a0: &a0 [1, 1]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    assert main(["train", str(tmp_path / "bomb.yaml")]) == 1
    assert "by aliases" in capsys.readouterr().err


def _png(path, width, height, data=b""):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(data)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b""))


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize(
    ("width", "height", "message"), [(1, 2_000_000, "times the other|cannot hold"), (13_000, 13_000, "cannot hold")]
)
def test_images_that_claim_more_than_their_file_holds(tmp_path, width, height, message):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        _png(tmp_path / split / "a" / "x.png", width, height)
    images = ts.data.load("imagenet", str(tmp_path), "train", size=32)
    with pytest.raises(ValueError, match=message):
        images.stack(torch.tensor([0]))


def test_lists_of_files_stay_in_their_folder(tmp_path):
    base = tmp_path / "tiny-imagenet-200"
    (base / "train" / "a" / "images").mkdir(parents=True)
    (base / "val" / "images").mkdir(parents=True)
    _png(base / "train" / "a" / "images" / "x.png", 1, 1, b"\0\0\0\0")
    for name in ("../../secret.png", "/etc/passwd", "../val_annotations.txt"):
        (base / "val" / "val_annotations.txt").write_text(f"{name}\ta\n")
        with pytest.raises(ValueError, match="the name of a file in 'images'"):
            ts.data.load("tiny-imagenet", str(tmp_path), "test")


def test_pickles_that_claim_a_large_memo(tmp_path):
    path = tmp_path / "data_batch_1"
    for bomb in (b"\x80\x02Nr\xff\xff\xff\x7f.", b"\x80\x02}q\x00r\xff\xff\xff\x3f.", b"N" + b"p2000000000\n."):
        path.write_bytes(bomb)
        with pytest.raises(ValueError, match="data_batch_1"):
            read_pickled_dict(path)
    shape = b"}U\x01acnumpy\nndarray\n)R(K\x01(I2000000000\nU\x01xtcnumpy\ndtype\n(U\x02u1tR\x89U\x01xtbs."
    for bomb in (shape, b"}U\x01x" + b"2\x86" * 40 + b"Ns."):
        path.write_bytes(bomb)
        with pytest.raises(ValueError, match="data_batch_1") as caught:
            read_pickled_dict(path)
        assert len(str(caught.value)) < 1000
    path.write_bytes(pickle.dumps({((1, 2), 3): 4}))
    with pytest.raises(ValueError, match="names as keys"):
        read_pickled_dict(path)
    path.write_bytes(pickle.dumps({b"labels": [1, 2], "more": "text"}, protocol=2))
    assert read_pickled_dict(path)["labels"] == [1, 2]


def _audit(environment, pipe=""):
    script = "import sys; from trysquare.lab.cli import main; sys.exit(main(sys.argv[1:]))"
    command = f"{sys.executable} -c '{script}' audit torch.nn:Identity --input-shape 3 {pipe}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, env={**os.environ, **environment}, check=False
    )


def test_a_reader_that_has_seen_enough_is_no_error():
    found = _audit({}, "| head -c 1")
    assert b"rror" not in found.stderr
    assert b"Broken" not in found.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("command", ["recipes", "audit torch.nn:Identity --input-shape 3", "audit nothing:nothing"])
def test_streams_that_are_closed(closed, command):
    script = "import sys; from trysquare.lab.cli import main; sys.exit(main(sys.argv[1:]))"
    found = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c '{script}' {command} {closed}"], capture_output=True, check=False
    )
    assert found.returncode == ("nothing" in command)
    assert b"Error" not in found.stderr


def test_terminals_without_greek_letters():
    found = _audit({"PYTHONIOENCODING": "ascii", "TERM": "dumb"})
    assert found.returncode == 0, found.stderr
    assert b"s min" in found.stdout


def test_models_without_end():
    with pytest.raises(ValueError, match="at most"):
        ts.models.build("liresnet-aoc", (3, 32, 32), 10, depth=10**7)


ENDLESS = {
    "depths": ("resnet34", {"depths": [2000] * 64}),
    "many depths": ("resnet34", {"depths": [1000] * 3}),
    "a depth of many stages": ("imagenet-robust", {"widths": [16] * 64, "depth": 2000}),
    "stages that double": ("resnet34", {"depths": [1] * 60}),
    "an image": ("tiny-digits", {"input_shape": (1, 10**9, 10**9)}),
    "channels": ("tiny-digits", {"input_shape": (10**12, 8, 8)}),
    "classes": ("tiny-digits", {"classes": 10**12}),
    "many digits": ("tiny-digits", {"classes": 10**5000}),
    "a long kernel": ("tiny-digits", {"kernel_size": 10**12}),
}
MALFORMED = {
    "a list": ("tiny-digits", {"conv": ["aoc"]}),
    "a dictionary": ("tiny-digits", {"head": {}}),
    "a text": ("tiny-digits", {"widths": "16"}),
    "texts": ("tiny-digits", {"widths": ["16"]}),
    "lists": ("tiny-digits", {"widths": [[16]]}),
    "nothing": ("tiny-digits", {"dense_width": None}),
    "a truth": ("tiny-digits", {"dense_layers": True}),
    "half a layer": ("tiny-digits", {"dense_layers": 0.5}),
    "a word": ("liresnet-aoc", {"factor": "x"}),
    "a shape that is a number": ("tiny-digits", {"input_shape": 8}),
    "a shape of text": ("tiny-digits", {"input_shape": "1x8x8"}),
    "a shape of truths": ("tiny-digits", {"input_shape": (True, 8, 8)}),
    "classes by name": ("tiny-digits", {"classes": "ten"}),
    "a mean of text": ("tiny-digits", {"mean": ["a"]}),
    "a mean by name": ("tiny-digits", {"mean": {"a": 1}}),
    "a long name": ("tiny-digits", {"conv": "a" * 100_000}),
    "a long mode": ("tiny-digits", {"padding_mode": "a" * 100_000}),
    "less than no layers": ("tiny-digits", {"dense_layers": -3}),
    "less than no blocks": ("resnet34", {"depths": [3, -3]}),
    "a long option": ("tiny-digits", {"a" * 100_000: 1}),
}


@pytest.mark.parametrize("name", [*ENDLESS, *MALFORMED])
def test_arguments_of_models_are_refused_at_once(name):
    model, options = {**ENDLESS, **MALFORMED}[name]
    # Nothing is allocated on this device, so that nothing but a bound ends it.
    with torch.device("meta"), pytest.raises(ValueError, match=r"must be|not enough memory|unknown option") as caught:
        ts.models.build(model, **options)
    assert len(str(caught.value)) < 600


def test_the_messages_of_a_file_cannot_steer_a_terminal(capsys):
    assert main(["audit", "no\x1b]0;title\x07\x9b31m\u202e:factory", "--input-shape", "3"]) == 1
    assert capsys.readouterr().err.rstrip("\n").isprintable()
    assert main(["certify", "run\x1b[2J"]) == 1
    assert capsys.readouterr().err.rstrip("\n").isprintable()


@pytest.mark.parametrize("mean", [0.5, 1, [0.5], (0.5,), torch.tensor([0.5]), torch.tensor([0.5]).numpy()])
def test_means_of_every_kind_are_taken(mean):
    ts.models.build("tiny-digits", (1, 8, 8), mean=mean)
