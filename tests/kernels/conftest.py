"""Kernels are imported after the interpreter was chosen, where there is no CUDA."""

from tests.kernels import interpreter

interpreter.prepare()
