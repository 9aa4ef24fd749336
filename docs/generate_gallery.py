"""Run the examples of the gallery, and write docs/gallery.md from what they print and draw.

python docs/generate_gallery.py [NAME ...]

Without names the page is written from the runs that are there.
"""

import ast
import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

DOCS = Path(__file__).parent
GALLERY, EXAMPLES = DOCS / "gallery", DOCS.parent / "examples"
# What each example's figures stand beside.
BESIDE = {
    "certified_conformal": """Published with a 1-Lipschitz network on CIFAR-10, at 10 % and radius 0.03: coverage 95 %,
        sets of 1.72 classes (Massena et al., 2025). These are digits, so the sizes cannot be compared. What can is
        that coverage holds under attack, at no cost but the size of the sets. The usual sets keep their
        promise only without an attack, and those of a plain network lose it fastest. A set may be empty, so
        the mean size can be below 1.""",
    "distance_field": """The 1-Lipschitz network never says more than the distance to its own surface, and no ray jumps
        through it. In the mean it is further from the true distance than the plain network; that one was
        shown true distances, and it only which points are inside.""",
    "wasserstein": """Between CIFAR-10 and images of a GAN, where nobody knows the distance, critics with BCOP layers
        found 5.34, with RKO 4.95 and with one-sided spectral normalisation 3.29 (Li et al., 2019; more is
        closer to the truth). Here the truth is known. A shift is an easy case: all critics find nearly all
        of it, orthogonal ones the most and at once, and RKO is level with AOC.""",
    "very_deep": """Orthogonal weights at the start make a network with the same gradients as orthogonal layers (Xiao et
        al., 2018, train 10,000 layers from such a start). With steps of ordinary size they drift, and that
        network learns little or nothing; the one whose layers stay orthogonal does.""",
}


def run(name: str) -> None:
    """Run an example, and keep what it prints with date and hardware."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--out", str(GALLERY)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    where = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    (GALLERY / f"{name}.txt").write_text(f"{datetime.date.today().isoformat()}, {where}\n{printed}")


def page() -> str:
    """Return the page, from the files of the runs."""
    parts = [
        "# Gallery\n\nWhat orthogonal layers are for, each shown by one file that reads from top to bottom. Pictures "
        "and figures are those that the files wrote (`python docs/generate_gallery.py NAME`); every file has "
        "`--quick`, which ends within a minute.\n"
    ]
    for name, beside in BESIDE.items():
        text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
        title, _, rest = text.partition("\n\n")
        command, _, story = rest.partition("\n\n")
        made, _, printed = (GALLERY / f"{name}.txt").read_text().partition("\n")
        parts.append(
            f"## {title.rstrip('.')}\n\n{story}\n\n![{title}](gallery/{name}.png)\n\n"
            f"```text\n{printed.rstrip()}\n```\n\n"
            f"[`{command.split()[1]}`](../{command.split()[1]}), {made}. {' '.join(beside.split())}\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    GALLERY.mkdir(exist_ok=True)
    for chosen in sys.argv[1:]:
        run(chosen)
    (DOCS / "gallery.md").write_text(page())
