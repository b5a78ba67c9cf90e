"""Kernels in C for CPUs with AVX-512 BF16 and VNNI, compiled on the machine that runs them."""
