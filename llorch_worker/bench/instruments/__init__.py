"""Instruments around an engine: loads, clocks, ceilings, profiles, and where figures come from."""
