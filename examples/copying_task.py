"""The copying task: recurrent layers of torch and of this library repeat letters that were said before a long pause.

python examples/copying_task.py

Prints the loss over that of a network that knows when to answer, but not what; takes about two minutes.
"""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import trysquare as ts

SAID, PAUSE, LETTERS = 5, 30, 8
HIDDEN, STEPS = 64, 2000


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Return sequences of one-hot letters, then zeros with a mark where the answer begins, and the wanted answers."""
    said = torch.randint(1, LETTERS + 1, (count, SAID))
    rest = torch.zeros(count, PAUSE + SAID, dtype=torch.long)
    wanted = torch.cat([torch.zeros_like(rest), said], 1)
    rest[:, PAUSE - 1] = LETTERS + 1
    return nn.functional.one_hot(torch.cat([said, rest], 1), LETTERS + 2).float(), wanted


def trained(make: Callable[[], nn.Module]) -> list[float]:
    """Return the share of the loss after every 500 steps."""
    torch.manual_seed(0)
    rnn, head = make(), nn.Linear(HIDDEN, LETTERS + 1)
    optimizer = torch.optim.RMSprop([*rnn.parameters(), *head.parameters()], 1e-3)
    shares = []
    for step in range(STEPS):
        x, wanted = batch(32)
        loss = nn.functional.cross_entropy(head(rnn(x)[0]).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 499:
            shares.append(float(loss.detach()) * (2 * SAID + PAUSE) / (SAID * math.log(LETTERS)))
    return shares


def main() -> None:
    """Train one network after the other."""
    sizes = LETTERS + 2, HIDDEN
    print(f"{'layer':36s} share of the loss after 500, 1000, ... steps")
    runs: dict[str, Callable[[], nn.Module]] = {"nn.RNN, tanh": lambda: nn.RNN(*sizes, batch_first=True)}
    for kind, init in (
        ("maxmin", "henaff"), ("maxmin", "cayley"), ("maxmin", "random"), ("relu", "henaff"), ("abs", "henaff"),
        ("tanh", "henaff"),
    ):  # fmt: skip
        runs[f"OrthoRNN, {kind}, init={init}"] = lambda kind=kind, init=init: ts.OrthoRNN(  # type: ignore[misc]
            *sizes, nonlinearity=kind, batch_first=True, init=init
        )
    for name, make in runs.items():
        start = time.perf_counter()
        shares = trained(make)
        print(f"{name:36s} {'  '.join(f'{share:.2f}' for share in shares)}  ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
