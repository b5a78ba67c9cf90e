"""What a text may look like: grammars over token ids, and the masks that enforce them."""
