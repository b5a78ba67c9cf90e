"""Running steps on a device: its queue, uploads, graphs and warm-up."""
