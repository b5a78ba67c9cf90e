"""The engine on one CUDA device, compared with the device's own limits."""
