"""Celery workers that keep a language model resident and batch generation jobs continuously."""

__version__ = "0.1.0"
