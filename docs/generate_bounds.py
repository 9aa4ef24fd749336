"""Write the table of bounds of other people's networks into docs/certificates.md."""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.lipschitz.zoo import ZOO  # noqa: E402

import trysquare as ts  # noqa: E402

BEGIN, END = "<!-- bounds: made by docs/generate_bounds.py -->", "<!-- end of bounds -->"


def table() -> str:
    """The table in Markdown."""
    rows = ["| network | true constant, or lower bound found | our bound |", "|---|---|---|"]
    for name, (make, shape, constant) in ZOO.items():
        torch.manual_seed(0)
        model = make().eval()
        found = ts.lipschitz_bound(model, shape)
        lower = ts.lipschitz_lower_bound(model, torch.randn(4, *shape))
        truth = f"{constant:g}" if constant is not None else f"at least {lower:.4g}"
        rows.append(f"| {name} | {truth} | {found:.7g} |")
    return "\n".join(rows)


if __name__ == "__main__":
    page = ROOT / "docs" / "certificates.md"
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")
