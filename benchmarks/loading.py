"""Images a second that a loader gives, with different augmentations.

    python benchmarks/loading.py --root DIR [--name cifar10] [--batch 512] [--workers 1]

An epoch of batches is drawn and thrown away, three times; the fastest is shown. Compare with the images a second of
training: the loader works beside it in a thread, so that it costs a share of the cores.
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


def rate(loader: ts.data.Loader) -> float:
    """Images a second in the fastest of three epochs."""
    best = float("inf")
    for epoch in range(3):
        begin = time.perf_counter()
        for _ in loader.epoch(epoch):
            pass
        best = min(best, time.perf_counter() - begin)
    return len(loader) * loader.batch_size / best


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
        print(f"{label:42s} {rate(ts.data.Loader(images, args.batch, **options)):9.0f} images/s")


if __name__ == "__main__":
    main()
