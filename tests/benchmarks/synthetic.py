"""Small results with numbers that are easy to check, in the form in which each command writes them."""

from benchmarks.orthogonalizers import CONDITIONS, PEERS


def _memory(peak):
    return {"start": 1, "peak": peak, "parameters": 5, "saved": peak // 2}


def _row(train, evaluation, peak):
    samples = [_memory(size) for size in (peak, peak - 20, peak + 50)]  # the median counts
    memory = {"memory_train": samples, "memory_eval": samples}
    return {"train": [train] * 3, "eval": [evaluation] * 3, **memory}


def overhead(aoc_eval=1.0):
    rows = {
        "Conv2d": _row(1.0, 1.0, 100),
        "AOC": _row(1.5, aoc_eval, 104),
        "orthogonium AOC": _row(6.0, 2.0, 200),
        "SOC": {"error": "not ready after 1 s"},
        "orthogonium SOC": _row(8.0, 2.0, 200),
    }
    return {"resnet34": [{"network": "resnet34", "size": 224, "batch": 8, "rows": rows}]}


def orthogonalizers():
    run = {"seconds": [1.0, 2.0], "losses": [3.0, 1.0], "accuracy": 0.5, "certified": [0.25] * 4}
    peer, *_ = PEERS
    runs = {"cholesky": run, peer: {**run, "accuracy": 0.6}}
    ours = {"cholesky": [0.002], "bjorck": [0.004], "qr": [0.001], "exponential": [0.001]}
    return {
        "times": [{"shape": [1, 8, 8], "seconds": {**ours, peer: [0.003]}}],
        "errors": {name: [1e-7] * len(CONDITIONS) for name in ours} | {peer: [1e-8] * len(CONDITIONS)},
        "training": {
            "data": "digits",
            "steps": 2,
            "batch": 8,
            "runs": runs,
        },
    }


def scaling():
    kernels = [
        {"value": value, "seconds": {"trysquare": [value**2.0], "orthogonium": [100.0]}} for value in (2, 4, 8, 16)
    ]
    seconds = [{"Conv2d": [1.0 * b], "AOC": [1.0 * b + 1], "orthogonium AOC": [1.0 * b + 4]} for b in (1, 4, 8)]
    steps = [{"batch": b, "image size": 32, "seconds": row} for b, row in zip((1, 4, 8), seconds, strict=True)]
    return {"kernels": {"channels": kernels}, "overhead": {"batch": steps}}


def methods():
    names = ("Conv2d", "aoc", "orthogonium aoc")
    samples = {name: [0.001 * (1 + place)] for place, name in enumerate(names)}
    good = {"parameters": 1000, "steps": 5, "accuracy": 0.5, "certified": [0.4, 0.3, 0.2, 0.1], "lipschitz": 1.0}
    good |= {"seconds": [1.0, 2.0, 3.0, 4.0, 6.0], "losses": [1.0] * 5}
    better = {**good, "certified": [0.45, 0.3, 0.2, 0.1]}
    rows = {"aoc": good, "orthogonium aoc": better, "lot": {"error": "no data"}}
    seconds = {"build": samples, "step": samples, "eval": samples}
    cost = {"title": "small", "stride": 1, "seconds": seconds, "saved": dict.fromkeys(names, 1000), "errors": {}}
    return {"costs": [cost], "accuracy": {"data": "digits", "budget": 3.0, "rows": rows}}


def recipe():
    good = {"accuracy": 0.5, "certified": [0.4, 0.3, 0.2, 0.1], "lipschitz": 1.0, "test_images": 10}
    row = {"seconds": [10.0, 20.0], "results": [good, good], "steps": 5, "parameters": 1000}
    better = {**row, "results": [good, {**good, "certified": [0.45, 0.3, 0.2, 0.1]}]}
    return {"recipe": "digits", "budget": 20.0, "batch": 8, "rows": {"trysquare": row, "orthogonium": better}}


def kernels():
    row = {"flops": 800, "calls": 10, "saved": 2.0, "seconds": [0.002]}
    rows = {"trysquare": row, "orthogonium": {**row, "seconds": [0.001]}}
    evaluated = {"shape": [1, 2, 3, 3], "seconds": {"trysquare": [0.1], "nn.Conv2d": [0.1]}}
    square = [{"channels": 2, "size": 3, "rows": rows}]
    kept = [{"channels": 2, "seconds": {"kept": [0.1], "not kept": [0.2]}}]
    kept[0] |= {"saved": {"kept": 2000, "not kept": 1000}, "default": "kept"}
    return {"square": square, "kept": kept, "groups": {"1": 10}, "eval": [evaluated]}


def compose():
    entry = {"name": "two", "seconds": {"one way": [0.001], "another": [0.002]}}
    return {"kernels": [entry], "chains": [entry]}


def spectrum():
    ways = {
        "spectral_norm_bound": {"value": 2.0, "seconds": [0.1]},
        "orthogonium get_conv_sv (6)": {"value": 2.0, "seconds": [0.01]},
        "other": {"error": "RuntimeError: no"},
    }
    return {"layers": [{"name": "conv", "true": 2.0, "ways": ways}]}


def loading():
    rows = {"none": {"clock": [1.0, 3.0], "processor": [2.0, 1.0]}}
    return {"name": "digits", "batch": 8, "workers": 1, "rows": rows}


def counts():
    return {"square": {"flops": 1000, "calls": 5, "saved": 10, "written": 20}}


DATA = {
    "overhead": overhead,
    "orthogonalizers": orthogonalizers,
    "scaling": scaling,
    "methods": methods,
    "recipe": recipe,
    "kernels": kernels,
    "compose": compose,
    "spectrum": spectrum,
    "loading": loading,
    "counts": counts,
}


def result(name, data=None):
    return {
        "command": name,
        "line": f"python -m benchmarks {name} --flag",
        "date": "2026-01-02 03:04 UTC",
        "quick": False,
        "threads": 2,
        "machine": {"cpu": "A CPU", "cores": 2, "memory_gb": 8.0, "system": "Linux"},
        "versions": {"python": "3.12", "orthogonium": None},
        "missing": [],
        "data": DATA[name]() if data is None else data,
    }
