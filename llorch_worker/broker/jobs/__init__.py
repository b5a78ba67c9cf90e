"""One job from its claim to its end."""
