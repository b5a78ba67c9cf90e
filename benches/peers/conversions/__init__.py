"""Models in the formats of peers that do not read the GGUF file."""
