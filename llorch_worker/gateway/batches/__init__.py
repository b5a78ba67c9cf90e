"""Batches of the gateway's keys, driven by whichever gateway holds a batch's lease."""
