"""Write the table of bounds of other people's networks into docs/certificates.md."""

import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.verify.lipschitz.zoo import ZOO  # noqa: E402

import trysquare as ts  # noqa: E402

BEGIN, END = "<!-- bounds: made by docs/generate_bounds.py -->", "<!-- end of bounds -->"


def table() -> str:
    """The table in Markdown."""
    rows = ["| network | constant by theory | slope found | our bound |", "|---|---|---|---|"]
    for name, (make, shape, constant) in ZOO.items():
        torch.manual_seed(0)
        model = make().eval()
        found = ts.lipschitz_bound(model, shape)
        lower = ts.lipschitz_lower_bound(model, torch.randn(4, *shape))
        theory = f"{constant:g}" if constant is not None else ""
        rows.append(f"| {name} | {theory} | {lower:.4g} | {found:.7g} |")
    return "\n".join(rows)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of other libraries
    page = ROOT / "docs" / "certificates.md"
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")
