"""What the layers cost, next to what else there is: ``python -m benchmarks COMMAND [--quick] [--threads N]``.

One command a file (``commands.py`` says what is in it); the raw samples go to ``benchmarks/results/COMMAND.json``,
from which ``page`` writes ``docs/benchmarks.md``.
"""
