"""The whole way on the digits that come with the package: train, certify, attack, audit, report, export.

python examples/demo.py [DIRECTORY]
"""

import json
import sys
import time
from pathlib import Path

from trysquare.lab.cli import main
from trysquare.verify.certification import radius_text

FILES = {
    "recipe.yaml": "the recipe, every default filled in",
    "versions.json": "versions and machine",
    "metrics.jsonl": "training, one JSON object a line",
    "checkpoint.pt": "to resume from",
    "model.safetensors": "the model, for ts.load_model",
    "certificate.json": "certified radius of every test image",
    "attack.json": "what an attack found",
    "audit.json": "every layer, and the Lipschitz bound",
    "report.html": "all of it with pictures, for a browser",
    "export/model.pt2": "the model in plain torch, for torch.export.load",
}


def run(*command: str) -> float:
    """Run a command as a shell would, show it, and return how many seconds it took; end the demo if it fails."""
    print(f"\n$ trysquare {' '.join(command)}", flush=True)
    began = time.perf_counter()
    if code := main(command):
        sys.exit(code)
    return time.perf_counter() - began


def rows(title: str, table: list[tuple[str, str]]) -> None:
    """Print a table of two columns."""
    width = max(len(first) for first, _ in table)
    print(f"\n{title}")
    for first, second in table:
        print(f"  {first:<{width}}  {second}")


def demo(folder: str) -> None:
    """Everything, into one directory."""
    seconds = {"train": run("train", "digits", "--out", folder)}
    seconds["certify"] = run("certify", folder)
    seconds["attack"] = run("attack", folder)
    seconds["audit"] = run("audit", folder)
    seconds["report"] = run("report", folder)
    seconds["export"] = run("export", folder, "--format", "torch")
    found = json.loads((Path(folder) / "attack.json").read_text())
    radii = zip(found["epsilons"], found["certified"], found["attacked"], strict=True)
    accuracies = [("clean", f"{found['clean']:.1%}")]
    accuracies += [(f"at radius {radius_text(e)}", f"certified {c:.1%}, under attack {a:.1%}") for e, c, a in radii]
    rows(f"accuracy on {found['samples']} test images", accuracies)
    rows(
        "seconds",
        [(name, f"{value:.0f}") for name, value in seconds.items()] + [("all", f"{sum(seconds.values()):.0f}")],
    )
    rows("files", [(str(Path(folder) / name), what) for name, what in FILES.items()])


if __name__ == "__main__":
    demo(sys.argv[1] if len(sys.argv) > 1 else f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
