"""The measurements of ``llorch bench``."""
