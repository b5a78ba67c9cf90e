"""Kernels in C for x86-64 CPUs with AVX2 or AVX-512, compiled when the package is built."""
