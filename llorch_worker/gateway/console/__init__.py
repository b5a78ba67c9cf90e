"""The console: a page at ``/`` to generate text, and to watch and mend the fleet."""
