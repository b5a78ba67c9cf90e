"""OpenAI's documents, and what they mean in the contract. No HTTP, no Redis, no torch."""
