"""A model's files on disk: large reads, and the header of GGUF. No torch."""
