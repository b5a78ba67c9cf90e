"""Takes requests in: renders chats, encodes texts, compiles grammars. Without torch.

What comes out is a document, so that this work may happen in another process than the engine's.
"""

from llorch_worker.intake.intake import Intake, Limits
from llorch_worker.intake.prepared import PreparedRequest

__all__ = ["Intake", "Limits", "PreparedRequest"]
