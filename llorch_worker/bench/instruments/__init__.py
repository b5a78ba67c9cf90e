"""Instruments around an engine: loads, clocks, ceilings, profiles and provenance."""
