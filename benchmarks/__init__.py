"""What the layers cost, next to the alternatives: ``python -m benchmarks QUESTION [--quick] [--threads N]``.

Each question is a module with ``run(arguments)``, which measures; ``describe(data)``, which returns tables; and
``draw(data)``, which returns a figure. Raw samples go to ``benchmarks/results/QUESTION.json``, and
``python -m benchmarks page`` renders ``docs/benchmarks.md`` from all of them.
"""
