import errno
import io
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress

import pytest
import torch

import trysquare as ts
from tests.lab.data.writers import write_imagenet
from tests.lab.training.small import arguments, recipe, same, start, state, trained, weights
from trysquare.lab.training import loop
from trysquare.lab.training.distribution import World, chosen_device
from trysquare.lab.training.loop import Display, Evaluation, Training, build_loss

CPU = World(torch.device("cpu"))


def test_a_run_directory(tmp_path):
    run = trained(tmp_path / "run")
    assert {path.name for path in run.path.iterdir()} == {
        "recipe.yaml", "versions.json", "metrics.jsonl", "checkpoint.pt", "model.safetensors",
    }  # fmt: skip
    assert ts.training.load_run(run.path).recipe == run.recipe
    assert {"trysquare", "torch", "python", "numpy", "platform", "threads", "date"} <= set(
        json.loads((run.path / "versions.json").read_text())
    )
    kinds = [(record["kind"], record["epoch"], record["step"]) for record in run.metrics()]
    assert kinds == [("train", 1, 11), ("evaluation", 1, 11), ("train", 2, 22), ("evaluation", 2, 22)]
    train, evaluation = run.metrics()[-2:]
    assert {"loss", "accuracy", "images_per_second", "seconds", "lr"} <= set(train)
    assert list(evaluation["certified"]) == ["0.141176", "0.25", "0.5", "1"]


def test_the_model_has_the_weights_that_were_evaluated(tmp_path):
    run = trained(tmp_path / "run")
    certificate = ts.training.certify_run(run)
    last = run.metrics()[-1]
    assert certificate.clean_accuracy == last["accuracy"]
    assert certificate.certified_accuracy(0.5) == pytest.approx(last["certified"]["0.5"], abs=0.003)
    assert not same(weights(run.path), state(run.path)["model"])  # schedule-free trains others


def test_same_seed_same_weights_whenever_it_is_evaluated(tmp_path):
    first, second = trained(tmp_path / "a"), trained(tmp_path / "b", **{"evaluate.every": 2})
    other = trained(tmp_path / "c", **{"train.seed": 1})
    assert same(weights(first.path), weights(second.path))
    assert not same(weights(first.path), weights(other.path))


def stopping_after(monkeypatch, step):
    """Make a run lose its power after a step."""

    class PowerCutError(BaseException):
        pass

    finished = Training.step

    def cut(self, *arguments):
        if self.progress.step == step:
            raise PowerCutError
        return finished(self, *arguments)

    monkeypatch.setattr(Training, "step", cut)
    return PowerCutError


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer.name": "adamw", "optimizer.warmup_steps": 5},
        {"optimizer.name": "sgd", "train.clip": 0.1, "train.accumulate": 2},
        {"optimizer.name": "nadam", "optimizer.lookahead": 6, "optimizer.average": 0.9},
        {"loss.name": "emma", "train.radius_start": 0.01, "model.centering": "batch"},
        {
            "optimizer.name": "riemannian-adam",
            "model.conv": "manifold",
            "optimizer.lookahead": 6,
            "optimizer.average": 0.9,
            "train.clip_layers": 0.1,
            "train.clip": 0.3,
        },
    ],
    ids=lambda options: options.get("optimizer.name") or options.get("loss.name", "schedule-free"),
)
def test_resuming_continues_bit_for_bit(tmp_path, monkeypatch, options):
    # 72 steps: the 64th looks after the free tensors, after the cut at the 60th.
    options = {"train.epochs": 8, "train.batch_size": 160, "train.checkpoint_every": 4, "evaluate.every": 3, **options}
    whole = trained(tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        error = stopping_after(patch, 59)
        with pytest.raises(error):
            trained(tmp_path / "cut", **options)
    assert state(tmp_path / "cut")["progress"]["step"] == 56
    resumed = ts.training.resume(tmp_path / "cut", quiet=True)
    assert same(weights(whole.path), weights(resumed.path))
    assert same(state(whole.path)["model"], state(resumed.path)["model"])
    timed = {"seconds", "images_per_second"}
    one, other = (
        [{key: value for key, value in record.items() if key not in timed} for record in run.metrics()]
        for run in (whole, resumed)
    )
    assert one == other


def test_kill_in_the_middle_then_resume(tmp_path):
    options = {"train.epochs": 6, "train.checkpoint_every": 5}
    process = start("trysquare", "train", "digits", "--out", tmp_path / "run", *arguments(**options))
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "tra')  # a line that was cut short
    (tmp_path / "run" / "model.safetensors.1.tmp").write_bytes(b"half")
    assert ts.training.load_run(tmp_path / "run").metrics() is not None
    run = ts.training.resume(tmp_path / "run", quiet=True)
    whole = trained(tmp_path / "whole", **options)
    assert same(weights(whole.path), weights(run.path))
    assert [record["epoch"] for record in run.metrics()] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert not list(run.path.glob("*.tmp"))


def test_an_interrupt_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "show", lambda self: self.progress.step == 5 and os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ts.training.StoppedError, match=r"after step 6; .* trysquare train --resume .*run"):
        trained(tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is before
    assert state(tmp_path / "run")["progress"]["step"] == 6
    monkeypatch.undo()
    resumed = ts.training.resume(tmp_path / "run", quiet=True)
    assert same(weights(resumed.path), weights(trained(tmp_path / "whole").path))


def test_a_run_may_go_on_for_more_epochs(tmp_path):
    trained(tmp_path / "run", **{"train.epochs": 1})
    run = ts.training.resume(tmp_path / "run", {"train.epochs": 2}, quiet=True)
    assert same(weights(run.path), weights(trained(tmp_path / "whole").path))
    assert ts.training.load_run(run.path).recipe.train.epochs == 2


@pytest.mark.parametrize(("stopped_at", "begun"), [(None, 3), (28, 3)])
def test_a_run_cannot_be_shorter_than_it_is(tmp_path, monkeypatch, stopped_at, begun):
    with monkeypatch.context() as patch:
        error = stopping_after(patch, stopped_at)
        with suppress(error):
            trained(tmp_path / "run", **{"train.epochs": 3, "train.checkpoint_every": 3})
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(
        ValueError, match=f"train.epochs=2, but the run is in epoch {begun} already: it must be at least {begun}"
    ):
        ts.training.resume(tmp_path / "run", {"train.epochs": 2}, quiet=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files
    assert len(ts.training.resume(tmp_path / "run", {"train.epochs": begun}, quiet=True).metrics()) == 2 * begun


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run_before_the_weights_are_touched(tmp_path, monkeypatch, broken):
    number, compute = [0], ts.losses.OffsetCrossEntropy.per_sample

    def explode(self, logits, labels):
        number[0] += 1
        value = compute(self, logits, labels)
        if number[0] < 16:  # the first is the check that the loss takes the logits
            return value
        return value * float("nan") if broken == "loss" else value + (logits.sum(1) * 0).sqrt()

    monkeypatch.setattr(ts.losses.OffsetCrossEntropy, "per_sample", explode)
    with pytest.raises(
        FloatingPointError, match=r"epoch 2, step 14.*last checkpoint is .*checkpoint.pt.*Lower optimizer"
    ):
        trained(tmp_path / "run")
    kept = state(tmp_path / "run")
    assert kept["progress"]["step"] == 11
    assert all(tensor.isfinite().all() for tensor in kept["model"].values())


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    parts = Training(recipe(), CPU)
    parts.run = ts.training.Run(tmp_path, recipe())
    with torch.no_grad():
        parts.model.head.bias[0] = float("inf")
    with pytest.raises(FloatingPointError, match="there was no checkpoint yet"):
        parts.save()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    run = trained(tmp_path / "run", **{"train.epochs": 1})
    files = {path.name: path.read_bytes() for path in run.path.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"cannot write .*recipe.yaml: No space left on device"):
            ts.training.resume(run.path, {"train.epochs": 2}, quiet=True)
        with pytest.raises(OSError, match=r"certificate.json: No space"):
            ts.training.certify_run(run, samples=5)
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == files
    with monkeypatch.context() as patch:
        patch.setattr(ts.training.Run, "save_state", full)
        with pytest.raises(OSError, match="No space"):
            ts.training.resume(run.path, {"train.epochs": 2}, quiet=True)
    assert (run.path / "checkpoint.pt").read_bytes() == files["checkpoint.pt"]
    assert same(weights(ts.training.resume(run.path, {"train.epochs": 2}, quiet=True).path),
                weights(trained(tmp_path / "whole").path))  # fmt: skip


def test_a_metrics_line_that_cannot_be_written_names_its_file(tmp_path):
    """The half of the line that still found room is gone when the run goes on."""
    run = trained(tmp_path / "run", **{"train.epochs": 1})
    size, limits = (run.path / "metrics.jsonl").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with pytest.raises(
            OSError, match=r"cannot write .*metrics.jsonl: File too large; go on later with --resume .*run"
        ):
            run.append_metrics({"kind": "train", "epoch": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (run.path / "metrics.jsonl").read_bytes()[size:] == b'{"kind": "train", "e'
    run = ts.training.resume(run.path, {"train.epochs": 2}, quiet=True)
    kinds = [(record["kind"], record["epoch"]) for record in run.metrics()]
    assert kinds == [("train", 1), ("evaluation", 1), ("train", 2), ("evaluation", 2)]


def test_a_read_only_directory_is_named(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match=r"cannot write .*recipe.yaml: Permission denied; what was there"):
        trained(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        trained(tmp_path / "file" / "run")


def test_a_directory_in_use_is_refused(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty.*--resume"):
        trained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_default_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trained(None, **{"train.epochs": 1}).path.parent.name == "runs"


def test_what_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe.yaml"):
        ts.training.resume(tmp_path)
    run = trained(tmp_path / "run")
    with pytest.raises(ValueError, match=r"optimizer.lr cannot change while .* what can: train.epochs, "):
        ts.training.resume(run.path, {"optimizer.lr": 1.0})
    good = (run.path / "checkpoint.pt").read_bytes()
    other = trained(tmp_path / "other", **{"model.dense_width": 32, "train.epochs": 1})
    (run.path / "checkpoint.pt").write_bytes((other.path / "checkpoint.pt").read_bytes())
    with pytest.raises(ValueError, match=r"is of another model: .*'dense_width': 32"):
        ts.training.resume(run.path)
    torch.save({**state(tmp_path / "other"), "model_arguments": Training(run.recipe, CPU).arguments},
               run.path / "checkpoint.pt")  # fmt: skip
    with pytest.raises(ValueError, match="does not fit the recipe"):
        ts.training.resume(run.path)
    (run.path / "checkpoint.pt").write_bytes(good[: len(good) // 2])
    with pytest.raises(ValueError, match="damaged"):
        ts.training.resume(run.path)
    (run.path / "checkpoint.pt").unlink()
    with pytest.raises(ValueError, match="before its first checkpoint"):
        ts.training.resume(run.path)


def test_data_is_checked_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="give the folder"):
        trained(tmp_path / "run", **{"data.name": "mnist"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss.name": "hkr-binary"}, r"loss 'hkr-binary' does not take 10 classes: logits of shape \(1, 10\)"),
        (
            {"train.batch_size": 1443},
            "train.batch_size=1443 is more than the 1442 training images: lower it to at most",
        ),
    ],
)
def test_what_does_not_fit_the_data_is_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", sorted(set(ts.losses.LOSSES) - {"hkr-binary", "binary-cross-entropy"}))
def test_other_losses_take_any_number_of_classes(name):
    Training(recipe(**{"loss.name": name}), CPU)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_folders_of_images_are_checked_before_anything_is_written(tmp_path, split, damage):
    write_imagenet(tmp_path / "data")
    path = tmp_path / "data" / split / "n02" / "n02_1.JPEG"
    path.write_bytes(path.read_bytes()[:-200] if damage is None else damage)
    folder = {"data.name": "imagenet", "data.root": str(tmp_path / "data"), "data.size": 8, "train.batch_size": 2}
    with pytest.raises(ValueError, match=r"n02_1.JPEG: expected an image, found"):
        trained(tmp_path / "run", **folder)
    assert not (tmp_path / "run").exists()
    Training(recipe(**folder), World(torch.device("cpu"), 1, 2))  # the first process checks for all


def test_the_loss_gets_the_margin_of_a_radius():
    chosen = recipe(**{"loss.radius": 0.5, "model.std": 0.5, "model.mean": 0.1})
    parts = Training(chosen, CPU)
    assert parts.loss.margin == pytest.approx(0.5 * 2 * 2**0.5, rel=1e-3)
    soft = recipe(**{"loss.name": "hkr-soft", "loss.radius": 0.5})
    assert build_loss(soft, parts.model, (1, 8, 8)).min_margin == pytest.approx(2**0.5, rel=1e-3)
    head = Training(recipe(**{"loss.radius": 0.5, "model.head": "unit-norm"}), World(torch.device("cpu")))
    rows = head.model.head.weight.detach()
    assert head.loss.margin == pytest.approx(0.5 * float(torch.cdist(rows, rows).max()), rel=1e-3)
    plain = recipe(**{"loss.name": "offset-cross-entropy", "loss.radius": None, "loss.margin": 0.3})
    assert build_loss(plain, parts.model, (1, 8, 8)).margin == 0.3
    emma = recipe(**{"loss.name": "emma"})
    assert build_loss(emma, parts.model, (1, 8, 8)).lipschitz == pytest.approx(2, rel=1e-3)


def test_a_radius_may_rise():
    chosen = recipe(**{"loss.radius": 1.0, "train.radius_start": 0.2})
    training = Training(chosen, CPU)
    final, margins = training.loss.margin, []
    training.steps = 100
    for step in (0, 25, 50, 99):
        training.set_radius(step)
        margins.append(training.loss.margin / final)
    assert margins == pytest.approx([0.2, 0.6, 1.0, 1.0])


def test_the_line_on_a_terminal(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    display = Display(10, 100, 0, 36 / 255, stream)
    assert not display.due()
    display.evaluated(0, Evaluation(0.5, 0.9, {36 / 255: 0.4}))
    display.last = display.began = time.monotonic() - 10
    assert display.due()
    display.show(1, 50, 0.25, 0.75, 1234.0)
    kept, line = stream.getvalue().split("\n")
    assert "accuracy 90.0%  certified at 36/255: 40.0%" in kept
    for part in (
        "epoch 2/10",
        "loss 0.2500",
        "accuracy 75.0%",
        "certified at 36/255: 40.0%",
        "1,234 images/s",
        "0:10 left",
    ):
        assert part in line
    assert not Display(1, 1, 0, 0.5, None).due()


def test_what_a_log_file_sees(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trysquare.lab.training.loop._PLAIN", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    ts.training.train(recipe(**{"train.epochs": 1}), tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"run directory: {tmp_path / 'run'}"
    assert len(lines) == 1 + 11 + 1
    assert all("\r" not in line for line in lines)


def test_signals_are_left_alone_outside_of_the_main_thread():
    from threading import Thread

    found = []
    thread = Thread(target=lambda: found.append(loop._stop_requests().__enter__().is_set()))
    thread.start()
    thread.join()
    assert found == [False]


def test_devices():
    assert chosen_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ValueError, match=r"train.device='nothing' cannot be used"):
        chosen_device("nothing")
