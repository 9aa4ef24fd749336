import threading

import pytest
import torch

from tests.lab.data import writers
from trysquare.lab.data import Loader, load
from trysquare.lab.data.loader import ahead

AUGMENT = {
    "random_resized_crop": {"scale": 0.5},
    "random_crop": {"padding": 1, "mode": "reflect"},
    "flip": {},
    "randaugment": {"num_ops": 2, "magnitude": 9},
}
REARRANGE = {"random_crop": {"padding": 1}, "flip": {}}


def assert_same(found, expected, tolerance=0.0):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for (x, y), (a, b) in zip(found, expected, strict=True):
        torch.testing.assert_close(x, a, rtol=0, atol=tolerance)
        assert torch.equal(y, b)


@pytest.fixture(scope="module")
def digits():
    return load("digits", split="test")


@pytest.fixture
def folder(tmp_path):
    writers.write_imagenet(tmp_path)
    return load("imagenet", tmp_path, size=14)


def test_batches_are_the_set_in_order(digits):
    images, labels = (torch.cat(parts) for parts in zip(*Loader(digits, 100), strict=True))
    assert images.dtype == torch.float32
    assert torch.equal(images * 16, digits.images.float())  # exact sixteenths
    assert torch.equal(labels, digits.labels)


def test_an_epoch_holds_every_image_once(digits):
    loader = Loader(digits, 100, shuffle=True)
    seen = torch.cat([images for images, _ in loader.epoch(5)]).flatten(1)
    assert not torch.equal(seen, digits.images.flatten(1) / 16)
    assert sorted(map(tuple, (seen * 16).int().tolist())) == sorted(map(tuple, digits.images.flatten(1).tolist()))


@pytest.mark.parametrize("drop_last", [False, True])
def test_length(digits, drop_last):
    loader = Loader(digits, 100, drop_last=drop_last)
    sizes = [len(labels) for _, labels in loader]
    assert sizes == [100, 100, 100] + [55] * (not drop_last)
    assert len(loader) == len(sizes)


def test_same_seed_same_batches(digits):
    def first(seed, epoch):
        return next(iter(Loader(digits, 64, AUGMENT, seed=seed, shuffle=True).epoch(epoch)))[0]

    assert torch.equal(first(1, 2), first(1, 2))
    others = [first(2, 2), first(1, 3), first(2, 1), first(0, 0)]
    assert not any(torch.equal(first(1, 2), other) for other in others)


def test_the_global_generator_is_left_alone(digits):
    before = torch.get_rng_state()
    list(Loader(digits, 100, AUGMENT, shuffle=True))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("start", [0, 2, 6])
def test_resume_continues_bit_for_bit(digits, start, workers):
    whole = list(Loader(digits, 64, AUGMENT, shuffle=True, seed=3).epoch(4))
    assert_same(Loader(digits, 64, AUGMENT, shuffle=True, seed=3, workers=workers).epoch(4, start), whole[start:])


def test_skipped_batches_are_not_read(digits):
    class Counting:
        labels, classes, white = digits.labels, digits.classes, digits.white
        read = 0

        def __len__(self):
            return len(digits)

        def stack(self, rows):
            self.read += len(rows)
            return digits.stack(rows)

    counting = Counting()
    list(Loader(counting, 100).epoch(0, start=3))
    assert counting.read == 55


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("augment", "tolerance"), [(REARRANGE, 0), (AUGMENT, 1e-5)])
def test_parts_of_all_ranks_are_the_batch(digits, world_size, augment, tolerance):
    ranks = [
        Loader(digits, 64, augment, shuffle=True, rank=rank, world_size=world_size).epoch(1)
        for rank in range(world_size)
    ]
    joined = [
        tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True)) for parts in zip(*ranks, strict=True)
    ]  # fmt: skip
    assert_same(joined, Loader(digits, 64, augment, shuffle=True).epoch(1), tolerance)


def test_last_batch_may_leave_a_rank_nothing(digits):
    sizes = [[len(y) for _, y in Loader(digits, 59, rank=r, world_size=4)] for r in range(4)]
    assert [len(s) for s in sizes] == [7] * 4
    assert sum(s[-1] for s in sizes) == 1


@pytest.mark.parametrize("augment", [{}, AUGMENT])
def test_folders(folder, augment):
    whole = list(Loader(folder, 4, augment, shuffle=True, workers=0))
    assert whole[0][0].shape == (4, 3, 14, 14)
    assert_same(Loader(folder, 4, augment, shuffle=True, workers=2).epoch(0, 1), whole[1:])
    parts = [Loader(folder, 4, augment, shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    joined = [(torch.cat([x, a]), torch.cat([y, b])) for (x, y), (a, b) in zip(*parts, strict=True)]
    assert_same(joined, whole, 1e-5)


def test_folder_parts_follow_the_boxes(folder):
    augment = {"random_resized_crop": {"scale": 0.3}}
    seen = torch.cat([images for images, _ in Loader(folder, 4, augment)])
    plain = torch.cat([images for images, _ in Loader(folder, 4)])
    assert (seen - plain).abs().amax((1, 2, 3)).min() > 0.1


def test_decoding_cuts_first(folder):
    with pytest.raises(ValueError, match="random_resized_crop cuts images while they are decoded"):
        Loader(folder, 4, {"flip": {}, "random_resized_crop": {}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1, "world_size": 2}, "world_size=2, batch_size=1"),
        ({"batch_size": 1000, "drop_last": True}, "no batch is left: batch_size=1000, but there are 355 images"),
        ({"workers": -1}, "workers=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"augment": {"flop": {}}}, "did you mean 'flip'"),
    ],
)
def test_refused(digits, options, message):
    with pytest.raises(ValueError, match=message):
        Loader(digits, **{"batch_size": 100} | options)


@pytest.mark.parametrize(("epoch", "start"), [(0, 5), (0, -1), (-1, 0)])
def test_start_is_a_batch_of_an_epoch(digits, epoch, start):
    with pytest.raises(ValueError, match=f"epoch {epoch} has the batches 0 to 3, it cannot start at {start}"):
        Loader(digits, 100).epoch(epoch, start)


def test_ahead_stops_its_threads_and_passes_errors_on():
    before = threading.active_count()
    early = ahead(lambda x: x, range(1000), workers=2)
    assert next(early) == 0
    early.close()
    with pytest.raises(ZeroDivisionError):
        list(ahead(lambda x: 1 // x, [1, 0, 1], workers=1))
    assert threading.active_count() == before
