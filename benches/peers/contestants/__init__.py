"""The contestants of ``python -m benches.peers``, each in a process of its own."""
