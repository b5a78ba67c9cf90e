"""Imported first by the process that :mod:`tests.forks` forks from."""

import gc

# It would look at what is imported again and again. tests.forks_settled enables it.
gc.disable()
