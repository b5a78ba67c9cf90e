"""The processor's limits: multiply-adds in registers, and reading of memory."""
