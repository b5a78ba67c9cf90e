"""The model's parts one by one, at Llama-2-7B's sizes: ``pytest benches/components``.

Each part is checked once against a plain reference in float64, then timed. Nothing here fails for
being slow: compare runs with ``--benchmark-save`` and ``--benchmark-compare``.
"""
