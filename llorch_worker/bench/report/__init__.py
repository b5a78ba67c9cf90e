"""Saved runs of benchmarks as one page. Needs neither torch nor the machine that measured."""
