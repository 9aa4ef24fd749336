"""What the layers cost, next to what else there is: ``python -m benchmarks COMMAND [--quick] [--threads N]``.

One command a file. Each measures (``measure``), says what it found (``describe``) and where a peer is better
(``peer_wins``); the raw samples go to ``benchmarks/results/COMMAND.json``, from which ``page`` writes
``docs/benchmarks.md``.
"""
