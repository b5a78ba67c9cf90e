"""Running steps on a device: its queue, graphs and warm-up."""
