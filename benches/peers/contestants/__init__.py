"""The contestants of ``python -m benches.peers``, each in its own process."""
