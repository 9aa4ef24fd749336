"""Images a second that a loader gives, with different augmentations.

    python benchmarks/loading.py --root DIR [--name cifar10] [--batch 512] [--workers 1]

An epoch of batches is drawn and thrown away, three times; the fastest is shown, by the clock and by processor time,
which other programs on the machine disturb less. Compare with the images a second of training: the loader works beside
it in a thread, so that it costs a share of the cores.
"""

from __future__ import annotations

import argparse
import time

import torch

import trysquare as ts

AUGMENTS = {
    "none": {},
    "crop, flip": {"random_crop": {"padding": 4}, "flip": {}},
    "resized crop 0.25": {"random_resized_crop": {"scale": 0.25}},
    "randaugment n=1, m=6": {"randaugment": {"num_ops": 1, "magnitude": 6}},
    "randaugment n=2, m=9": {"randaugment": {"num_ops": 2, "magnitude": 9}},
    "resized crop, flip, randaugment n=2, m=6": {
        "random_resized_crop": {"scale": 0.25},
        "flip": {},
        "randaugment": {"num_ops": 2, "magnitude": 6},
    },
}


def rates(loader: ts.data.Loader) -> tuple[float, float]:
    """Images a second, and a second of processor time, in the fastest of three epochs."""
    clocks = (time.perf_counter, time.process_time)
    best = [float("inf")] * len(clocks)
    for epoch in range(3):
        begin = [clock() for clock in clocks]
        for _ in loader.epoch(epoch):
            pass
        best = [min(least, clock() - start) for least, clock, start in zip(best, clocks, begin, strict=True)]
    images = len(loader) * loader.batch_size
    return images / best[0], images / best[1]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root")
    parser.add_argument("--name", default="cifar10")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    images = ts.data.load(args.name, args.root)
    print(f"{args.name}, batches of {args.batch}, {args.workers} workers, {torch.get_num_threads()} threads each")
    for label, augment in AUGMENTS.items():
        options = {"augment": augment, "shuffle": True, "drop_last": True, "workers": args.workers}
        wall, processor = rates(ts.data.Loader(images, args.batch, **options))
        print(f"{label:42s} {wall:9.0f} images/s {processor:9.0f} a processor second")


if __name__ == "__main__":
    main()
