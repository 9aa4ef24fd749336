"""Generated images beside real ones: what a file must hold, and which batches there are."""

import io
import zipfile

import numpy as np
import pytest
import torch

import trysquare as ts
from tests.lab.data import writers
from tests.lab.training.small import trained
from trysquare.lab.data import ImageSet, Loader, read_extra
from trysquare.lab.data.sets import Mixed

CLASSES = ("a", "b", "c")


def real(count=12, shape=(3, 6, 4)):
    """Image ``i`` has the value ``i`` everywhere."""
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, *shape).clone()
    return ImageSet(images, torch.arange(count) % 3, CLASSES)


def extra(count=10, shape=(3, 6, 4)):
    images = (100 + torch.arange(count)).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, *shape).clone()
    return ImageSet(images, (torch.arange(count) + 1) % 3, CLASSES)


def values(loader, epoch):
    return [(images[:, 0, 0, 0] * 255).round().int().tolist() for images, _ in loader.epoch(epoch)]


@pytest.mark.parametrize("layout", ["channels last", "channels first", "grey", "compressed", "other names"])
def test_reads_what_is_written(tmp_path, layout):
    shape = (1, 6, 4) if layout == "grey" else (3, 6, 4)
    pixels = np.random.default_rng(0).integers(0, 256, (9, *shape), dtype=np.uint8)
    labels = np.arange(9) % 3
    stored = {
        "channels first": pixels, "grey": pixels[:, 0], "other names": pixels.transpose(0, 2, 3, 1),
    }.get(layout, pixels.transpose(0, 2, 3, 1))  # fmt: skip
    names = ("image", "label") if layout == "other names" else ("images", "labels")
    save = np.savez_compressed if layout == "compressed" else np.savez
    save(tmp_path / "extra.npz", **dict(zip(names, (stored, labels.astype(np.uint8)), strict=True)))
    found = read_extra(tmp_path / "extra.npz", real(shape=shape))
    assert torch.equal(found.images, torch.from_numpy(pixels))
    assert found.labels.tolist() == labels.tolist()
    assert found.classes == CLASSES


IMAGES, LABELS = np.zeros((4, 6, 4, 3), np.uint8), np.array([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": IMAGES, "labels": LABELS}, "expected an array called images or image, found pictures, labels"),
        ({"images": IMAGES}, "expected an array called labels or label, found images"),
        ({"images": IMAGES.astype(np.float32), "labels": LABELS}, "expected uint8 images .*, found images float32"),
        ({"images": IMAGES, "labels": LABELS[:3]}, r"found images uint8 \(4, 6, 4, 3\) and labels int64 \(3,\)"),
        ({"images": IMAGES, "labels": LABELS / 2}, "labels float64"),
        ({"images": IMAGES, "labels": LABELS + 1}, "expected labels from 0 to 2, found 3 for image 2"),
        ({"images": IMAGES, "labels": LABELS - 1}, "found -1 for image 0"),
        (
            {"images": IMAGES[:, :5], "labels": LABELS},
            r"expected images of shape \(6, 4, 3\) or \(3, 6, 4\), found \(5, 4, 3\)",
        ),
        (
            {"images": np.array([None] * 4), "labels": LABELS},
            r"extra\.npz: images\.npy is no array of numbers: Object arrays",
        ),
        ({"images": np.zeros((20_000, 32, 32, 3), np.uint8), "labels": np.zeros(20_000, int)}, "claim to be"),
    ],
)
def test_refuses_other_files(tmp_path, arrays, message):
    np.savez_compressed(tmp_path / "extra.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_extra(tmp_path / "extra.npz", real())


def test_refuses_what_is_no_archive(tmp_path):
    path = tmp_path / "extra.npz"
    for content in (b"", b"nothing", b"PK\x03\x04" + bytes(50)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"extra\.npz: expected an npz file"):
            read_extra(path, real())
    buffer = io.BytesIO()
    np.save(buffer, IMAGES)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="expected an npz file"):
        read_extra(path, real())
    np.savez(path, images=IMAGES, labels=LABELS)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="expected an npz file"):
        read_extra(path, real())
    with pytest.raises(OSError, match="nowhere"):
        read_extra(tmp_path / "nowhere.npz", real())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", b"no array")
        archive.writestr("labels.npy", b"no array")
    with pytest.raises(ValueError, match=r"images\.npy is no array of numbers"):
        read_extra(path, real())


def test_headers_that_claim_too_much_take_no_memory(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 6, 4, 3)})
    with zipfile.ZipFile(tmp_path / "extra.npz", "w") as archive:
        archive.writestr("images.npy", header.getvalue() + bytes(100))
    with pytest.raises(ValueError, match="is larger than the file"):
        read_extra(tmp_path / "extra.npz", real())


def test_refuses_sets_with_other_levels(tmp_path):
    np.savez(tmp_path / "extra.npz", images=np.zeros((2, 8, 8), np.uint8), labels=np.zeros(2, int))
    with pytest.raises(ValueError, match="256 levels do not go with a set whose white is 16"):
        read_extra(tmp_path / "extra.npz", ts.data.load("digits"))


def test_a_batch_has_one_real_image_to_so_many_others():
    loader = Loader(real(), 8, drop_last=True, shuffle=True, extra=extra(), per_image=3)
    assert len(loader) == 6
    seen_real, seen_extra = [], []
    for epoch in range(5):
        in_epoch = []
        for batch in values(loader, epoch):
            assert [value < 100 for value in batch] == [True, False, False, False] * 2
            in_epoch += [value for value in batch if value < 100]
            seen_extra += [value for value in batch if value >= 100]
        assert sorted(in_epoch) == list(range(12))
        seen_real.append(in_epoch)
    assert seen_real[0] != seen_real[1]
    # Passes over the extra images, each in another order, whatever the epochs.
    assert len(seen_extra) == 5 * 36
    passes = [seen_extra[start : start + 10] for start in range(0, 180, 10)]
    assert all(sorted(each) == list(range(100, 110)) for each in passes)
    assert len({tuple(each) for each in passes}) == 18


def test_labels_go_with_images():
    for images, labels in Loader(real(), 4, drop_last=True, shuffle=True, extra=extra(), per_image=1):
        for value, label in zip((images[:, 0, 0, 0] * 255).round().int().tolist(), labels.tolist(), strict=True):
            assert label == (value % 3 if value < 100 else (value - 100 + 1) % 3)


def test_resumes_and_is_shared_like_any_other():
    options = {"drop_last": True, "shuffle": True, "extra": extra(), "per_image": 3, "seed": 4}
    augment = {"random_crop": {"padding": 1}, "flip": {}}
    whole = list(Loader(real(), 8, augment, **options).epoch(2))
    for found, (images, labels) in zip(Loader(real(), 8, augment, **options).epoch(2, 4), whole[4:], strict=True):
        assert torch.equal(found[0], images)
        assert torch.equal(found[1], labels)
    parts = [list(Loader(real(), 8, augment, **options, rank=rank, world_size=2).epoch(2)) for rank in range(2)]
    for first, second, (images, labels) in zip(*parts, whole, strict=True):
        assert torch.equal(torch.cat([first[0], second[0]]), images)
        assert torch.equal(torch.cat([first[1], second[1]]), labels)


@pytest.mark.parametrize("options", [{"batch_size": 10, "per_image": 3}, {"per_image": 0}, {"drop_last": False}])
def test_refuses_batches_that_cannot_be_divided(options):
    with pytest.raises(ValueError, match="whole batches consist of"):
        Loader(real(), **{"batch_size": 8, "drop_last": True, "extra": extra(), "per_image": 1, **options})


def test_sets_that_do_not_go_together():
    with pytest.raises(ValueError, match=r"must have shape \(3, 6, 4\), found \(3, 6, 5\)"):
        Mixed(real(), extra(shape=(3, 6, 5)))
    with pytest.raises(ValueError, match="must have classes"):
        Mixed(real(), ImageSet(extra().images, extra().labels, ("x", "y", "z")))


def test_a_run_trains_with_them(tmp_path):
    writers.write_mnist(tmp_path / "data")
    images = ts.data.load("mnist", tmp_path / "data")
    np.savez(tmp_path / "extra.npz", images=images.images[:7, 0].numpy(), labels=images.labels[:7].numpy())
    options = {
        "data.name": "mnist", "data.root": str(tmp_path / "data"), "data.extra": str(tmp_path / "extra.npz"),
        "data.extra_per_image": 1, "train.batch_size": 4, "train.epochs": 1, "model.widths": [4],
    }  # fmt: skip
    run = trained(tmp_path / "run", **options)
    steps = len(images) // 2
    assert run.metrics()[-1]["step"] == steps
