"""Run directories of strangers: nothing in them is executed, waited for, written through or believed."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest
import safetensors.torch
import torch

import trysquare as ts
from trysquare.lab import checkpoint
from trysquare.lab.checkpoint import encoded, packed, read_checkpoint, unpacked
from trysquare.lab.cli import main
from trysquare.lab.report import write_report

ARGUMENTS = {"name": "tiny-digits", "input_shape": (1, 8, 8), "classes": 10}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    run = ts.training.train(ts.training.read_recipe("digits", {"train.epochs": 1}), path, quiet=True)
    ts.training.certify_run(run, samples=5)
    return run.path


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def saved(path, model, arguments=ARGUMENTS):
    path.write_bytes(encoded(model, "trysquare.models:build", arguments))


def test_modules_beside_a_run_are_not_imported(run):
    """Whatever torch or another library imports late, the folder of the run is not where it is looked for."""
    for name in ("cProfile", "mpmath", "sympy", "networkx", "jinja2", "matplotlib", "rich", "onnx", "PIL", "scipy"):
        (run / f"{name}.py").write_text("import pathlib; pathlib.Path('ran').touch()\n")
    script = "import sys; sys.path.pop(0); from trysquare.lab.cli import main; sys.exit(main(sys.argv[1:]))"
    for command in (["audit", "."], ["certify", ".", "--samples", "5"], ["report", "."]):
        found = subprocess.run(
            [sys.executable, "-c", script, *command], cwd=run, capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, found.stderr
        assert not (run / "ran").exists(), command


def test_reading_leaves_the_path_of_modules_alone(run, monkeypatch):
    monkeypatch.chdir(run)
    before = list(sys.path)
    ts.load_model(".")
    assert sys.path == before
    (run / "factory_of_mine.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n")
    ts.load_model("factory_of_mine:build")
    assert sys.path == before
    with pytest.raises(ValueError, match="cannot import"):
        ts.load_model("no_such_module:build")
    assert sys.path == before


def test_the_working_directory_shadows_nothing_that_is_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colorsys.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "factory_of_yours.py").write_text(
        "import colorsys\nfrom torch import nn\ndef build():\n    return nn.Linear(2, 2)\n"
    )
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert isinstance(ts.load_model("factory_of_yours:build"), torch.nn.Linear)


def test_a_factory_that_exits_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit(0)\n")
    for factory in ("sys:exit", "exits_at_import:build"):
        assert main(["audit", factory, "--input-shape", "3"]) == 1
        assert "SystemExit" in capsys.readouterr().err


def zipped(content, **options):
    """What torch.save wrote, with its members packed anew."""
    target = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, **options) as out,
    ):
        for member in source.infolist():
            out.writestr(member.filename, source.read(member))
    return target.getvalue()


def old_file(state):
    buffer = io.BytesIO()
    torch.save({"factory": "trysquare.models:build", "arguments": ARGUMENTS, "state_dict": state}, buffer)
    return buffer.getvalue()


def overlapping(content):
    """The same with a central directory that names its largest member many times."""
    with zipfile.ZipFile(io.BytesIO(content)) as source:
        start = source.start_dir
    end = content.rindex(b"PK\x05\x06")
    directory = content[start:end]
    if (zip64 := directory.find(b"PK\x06\x06")) >= 0:
        directory = directory[:zip64]
    with zipfile.ZipFile(io.BytesIO(content)) as source:
        entries = len(source.infolist())
    times = 500
    sizes = (times * entries).to_bytes(2, "little") * 2 + (times * len(directory)).to_bytes(4, "little")
    return (
        content[:start] + directory * times + b"PK\x05\x06" + bytes(4) + sizes + start.to_bytes(4, "little") + bytes(2)
    )


def two_directories(content, hidden):
    """A file whose directory, right before its end, is not at the place that the end names, where there is another.

    Python takes the first of them, torch the second.
    """
    with zipfile.ZipFile(io.BytesIO(hidden)) as archive:
        other = archive.start_dir
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries, start = len(archive.infolist()), archive.start_dir
    end = content.rindex(b"PK\x05\x06")
    directory = content[start:end]
    if (zip64 := directory.find(b"PK\x06\x06")) >= 0:
        directory = directory[:zip64]
    counts = entries.to_bytes(2, "little") * 2 + len(directory).to_bytes(4, "little")
    last = b"PK\x05\x06" + bytes(4) + counts + other.to_bytes(4, "little") + bytes(2)
    return hidden + content[:start] + directory + last


def test_what_is_looked_at_is_what_is_read(tmp_path):
    """An archive that two readers understand in two ways is read in one, or refused."""
    model = ts.models.build(**ARGUMENTS)
    clean = old_file(model.state_dict())
    hidden = zipped(old_file({"a": torch.zeros(10)}))
    (tmp_path / "model.pt").write_bytes(two_directories(clean, hidden))
    try:
        found = read_checkpoint(tmp_path / "model.pt")["state_dict"]
    except ValueError:
        return
    assert found.keys() == model.state_dict().keys()


def test_compressed_files_are_refused_before_they_are_read(tmp_path):
    model = ts.models.build(**ARGUMENTS)
    whole = old_file(model.state_dict())
    (tmp_path / "model.pt").write_bytes(whole)
    read_checkpoint(tmp_path / "model.pt")
    for bomb in (zipped(old_file({"a": torch.zeros(10**7)})), overlapping(whole)):
        (tmp_path / "model.pt").write_bytes(bomb)
        with pytest.raises(ValueError, match=r"model\.pt is damaged.*(compressed|claim)"):
            ts.load_model(tmp_path / "model.pt")
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(10**6)}, buffer)
    (tmp_path / "checkpoint.pt").write_bytes(zipped(buffer.getvalue()))
    with pytest.raises(ValueError, match=r"checkpoint\.pt is not .* compressed"):
        unpacked(tmp_path / "checkpoint.pt")


def test_tensors_that_repeat_what_they_have_are_refused(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(packed({"a": [torch.zeros(1).expand(10**6, 10**6)]}))
    with pytest.raises(ValueError, match="repeats the 4 bytes"):
        unpacked(tmp_path / "checkpoint.pt")
    (tmp_path / "model.pt").write_bytes(old_file({"a": torch.zeros(1).expand(10**6, 10**6)}))
    with pytest.raises(ValueError, match="repeats the 4 bytes"):
        read_checkpoint(tmp_path / "model.pt")


def test_shared_values_in_a_checkpoint_are_no_trap(tmp_path, monkeypatch):
    bomb = ()
    for _ in range(40):
        bomb = (bomb, bomb)
    (tmp_path / "checkpoint.pt").write_bytes(packed({"model_arguments": {"a": bomb}}))
    with pytest.raises(ValueError, match="by naming some again"):
        unpacked(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize(
    "options",
    [{"widths": [10**6]}, {"dense_width": 10**6}, {"dense_layers": 2000, "dense_width": 10**5}],
    ids=["widths", "dense", "layers"],
)
def test_arguments_that_ask_for_more_memory_than_the_file_are_refused(run, options):
    """Each of these models would take more than 30 GB."""
    model = ts.models.build(**ARGUMENTS)
    saved(run / "model.safetensors", model, {**ARGUMENTS, **options})
    with pytest.raises(ValueError, match="weights of another model"):
        ts.load_model(run)
    state = unpacked(run / "checkpoint.pt")
    state["model_arguments"] |= {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    (run / "checkpoint.pt").write_bytes(packed(state))
    with pytest.raises(ValueError, match="is of another model"):
        ts.training.resume(run, {"train.epochs": 2}, quiet=True)
    recipe = (run / "recipe.yaml").read_text()
    for name, value in options.items():
        lines = recipe.splitlines()
        at = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
        lines[at] = f"  {name}: {value}"
        if isinstance(value, list):
            del lines[at + 1]
        recipe = "\n".join(lines)
    (run / "recipe.yaml").write_text(recipe)
    with pytest.raises(ValueError, match="does not fit the recipe"):
        ts.training.resume(run, {"train.epochs": 2}, quiet=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float64])
def test_weights_of_another_number_format_are_refused(tmp_path, dtype):
    model = ts.models.build(**ARGUMENTS)
    state = {name: value.to(dtype) for name, value in model.state_dict().items()}
    model.state_dict = lambda: state
    saved(tmp_path / "model.safetensors", model)
    with pytest.raises(ValueError, match=rf"{dtype} in the file and torch.float32 in the model"):
        ts.load_model(tmp_path)


def test_shorter_numbers_are_widened(tmp_path):
    model = ts.models.build(**ARGUMENTS).bfloat16()
    saved(tmp_path / "model.safetensors", model)
    assert next(ts.load_model(tmp_path).parameters()).dtype == torch.float32


def commands(run):
    yield ["certify", str(run), "--samples", "5"]
    yield ["attack", str(run), "--samples", "5"]
    yield ["audit", str(run)]
    yield ["report", str(run)]
    yield ["export", str(run)]
    yield ["train", "--resume", str(run), "--train.epochs", "2"]


FILES = [
    "recipe.yaml", "versions.json", "metrics.jsonl", "checkpoint.pt", "model.safetensors", "certificate.json",
    "attack.json", "audit.json", "report.html", "export/model.pt2",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(name, run, capsys):
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)

    def all_commands():
        for command in commands(run):
            main(command)

    thread = threading.Thread(target=all_commands, daemon=True)
    thread.start()
    thread.join(60)
    waited = thread.is_alive()
    if waited:  # let it go
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    assert not waited
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", FILES)
def test_a_hard_link_in_the_place_of_a_file_is_not_written_through(name, run, tmp_path, capsys):
    path, mine = run / name, tmp_path / "mine"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        shutil.copy(path, mine)
    else:
        mine.write_text("{}\n")
    path.unlink(missing_ok=True)
    os.link(mine, path)
    before = mine.read_bytes()
    for command in commands(run):
        main(command)
    assert mine.read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt", "certificate.json", "audit.json", "report.html"])
def test_a_link_onto_another_file_of_the_run_is_not_written_through(name, run, capsys):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to("model.safetensors")
    before = (run / "model.safetensors").read_bytes()
    for command in commands(run):
        if command[0] != "train":
            main(command)
    assert (run / "model.safetensors").read_bytes() == before
    main(["train", "--resume", str(run), "--train.epochs", "2"])
    assert read_checkpoint(run / "model.safetensors")


def test_a_folder_of_exports_that_is_a_link(run, tmp_path):
    (tmp_path / "outside").mkdir()
    (run / "export").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="symbolic link"):
        ts.training.export_run(ts.training.load_run(run))
    assert not list((tmp_path / "outside").iterdir())


def test_of_two_runs_that_start_in_one_directory_one_gives_way(tmp_path):
    """The second one finds the lock of the first, whether it has written anything yet or not."""
    recipe = ts.training.read_recipe("digits", {"train.epochs": 1})
    path = tmp_path / "run"
    path.mkdir()
    with ts.training.run.Run(path, recipe).locked(), pytest.raises(ValueError, match="another process"):
        ts.training.train(recipe, path, quiet=True)
    assert not list(path.iterdir())
    ts.training.train(recipe, path, quiet=True)
    assert json.loads((path / "versions.json").read_text())


def test_a_line_that_is_no_measurement_is_named(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("dear diary\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 3 is not JSON"):
        ts.training.load_run(run).metrics()


def with_factory(path, factory):
    """A whole file, of its digest, that names a factory which ``save_checkpoint`` would not write."""
    tensors = {"weight": torch.zeros(2, 2)}
    metadata = {"factory": factory, "arguments": '{"dict": {}}', "parameters": "4", "sha256": "0" * 64}
    path.write_bytes(checkpoint._sealed(safetensors.torch.save(tensors, metadata)))


@pytest.mark.parametrize(
    "factory", ["a:b; rm -rf ~", "a:b\n", "$(touch ran):b", "a:\x1b[2J", "a:b --input-shape", "ab", "a:b:c", "", ":b"]
)
def test_a_factory_that_is_no_name_is_not_repeated(factory, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    with_factory(path, factory)
    assert main(["audit", str(path), "--input-shape", "2"]) == 1
    message = capsys.readouterr().err
    assert "must be 'package.module:function'" in message
    assert "--factory" not in message
    assert message.rstrip("\n").isprintable()
    with pytest.raises(ValueError, match=r"must be 'package\.module:function'"):
        ts.save_checkpoint(path, torch.nn.Linear(2, 2), factory)


def test_the_command_that_is_advised_can_be_pasted(tmp_path):
    path = tmp_path / "two words; true" / "model.safetensors"
    path.parent.mkdir()
    with_factory(path, "torch.nn:Identity")
    with pytest.raises(ValueError, match="is not run") as caught:
        ts.load_model(path)
    *_, command = str(caught.value).split(", or ")
    assert shlex.split(command) == ["trysquare", "audit", str(path), "--factory", "torch.nn:Identity"]


@pytest.mark.parametrize("name", [["a"], {"a": 1}, None, 3])
def test_a_model_without_a_name_is_told(name, tmp_path):
    saved(tmp_path / "model.safetensors", ts.models.build(**ARGUMENTS), {**ARGUMENTS, "name": name})
    with pytest.raises(ValueError, match="must be the name of a model"):
        ts.load_model(tmp_path)


def test_recipes_are_small(run):
    with (run / "recipe.yaml").open("ab") as file:
        file.write(b"#" * 2**20)
    for read in (ts.training.load_run, ts.training.resume, write_report):
        with pytest.raises(ValueError, match=r"recipe.yaml has \d+ bytes, and a file of its kind at most 1048576"):
            read(run)


def test_torch_and_safetensors_read_files_of_a_run_as_the_page_says(run):
    with (run / "checkpoint.pt").open("rb") as file:
        file.readline()
        state = torch.load(io.BytesIO(file.read()), weights_only=True)
    assert state["model"].keys() == safetensors.torch.load_file(run / "model.safetensors").keys()


WILD = {
    "1e400": "1e400", "-1e400": "-1e400", "5000 digits": "9" * 5000, "400 digits": "9" * 400, "1e308": "1e308",
    "NaN": "NaN", "deep": "[" * 100_000 + "]" * 100_000, "a list": "[1, [2]]", "a text": '"x"', "nothing": "null",
    "true": "true", "an object": '{"a": 1}', "below 0": "-1", "a fraction": "0.5",
}  # fmt: skip


@pytest.mark.parametrize("wild", WILD)
def test_wild_numbers_in_the_files_of_a_run_are_answered_or_drawn(wild, run, capsys):
    """In each file, each value that a name stands before is replaced in turn."""
    for name in ("certificate.json", "metrics.jsonl"):
        text = (run / name).read_text()
        places = re.finditer(r'"\w+": (-?[\d.e+-]+|null|\[)', text)
        for found in {match[0].split(":")[0]: match for match in places}.values():
            end = found.end(1) if found[1] != "[" else text.index("]", found.end()) + 1
            (run / name).write_text(text[: found.start(1)] + WILD[wild] + text[end:])
            try:
                code: object = main(["report", str(run)])
            except SystemExit as exit_:
                code = exit_.code
            said = capsys.readouterr()
            assert code in (0, 1, 2), found[0]
            assert "Traceback" not in said.err, found[0]
            assert len(said.err) < 2000, found[0]
            assert code == 0 or name in said.err, (found[0], said.err)
        (run / name).write_text(text)
