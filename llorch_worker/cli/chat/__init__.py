"""``llorch chat``: a conversation in the terminal."""

from llorch_worker.cli.chat.command import chat

__all__ = ["chat"]
