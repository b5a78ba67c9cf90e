"""Starts and watches the processes of one machine: Redis, workers, a gateway and Flower."""
