"""Runs files of requests, for the gateway and for the command line: each line once."""
