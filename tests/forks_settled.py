"""Imported last by the process that :mod:`tests.forks` forks from."""

import gc

# Otherwise each fork copies and collects what it never frees.
gc.collect()
gc.freeze()
gc.enable()
