"""What a text may look like: grammars over token ids, and the masks that enforce them.

Functions import llguidance, not modules: most workers never see a grammar, and the library with its
view of the vocabulary takes 14 MiB for 32,000 tokens.
"""
