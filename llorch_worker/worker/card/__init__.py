"""Which card a worker uses: one worker a card."""
