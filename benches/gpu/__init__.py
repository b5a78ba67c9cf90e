"""The engine on one CUDA device against what the device itself can do."""
