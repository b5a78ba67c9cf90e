"""Text to tokens and back: tokenizer, incremental detokenizer, stop strings, chat templates."""

from llorch_worker.text.chat_templates import ChatOptions
from llorch_worker.text.detokenizer import IncrementalDetokenizer
from llorch_worker.text.least_tokens import TooManyTokens
from llorch_worker.text.loading import load_tokenizer
from llorch_worker.text.stop_strings import StopStrings
from llorch_worker.text.thoughts import ThoughtSplitter
from llorch_worker.text.tokenizer import Tokenizer

__all__ = [
    "ChatOptions",
    "IncrementalDetokenizer",
    "StopStrings",
    "ThoughtSplitter",
    "Tokenizer",
    "TooManyTokens",
    "load_tokenizer",
]
