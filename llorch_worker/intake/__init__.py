"""Takes requests in: renders chats, encodes texts, compiles grammars. Without torch.

What comes out is a document, so that this may happen in another process than the engine's.
"""
