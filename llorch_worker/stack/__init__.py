"""Starts and watches the processes of one machine: Redis, workers and Flower."""
