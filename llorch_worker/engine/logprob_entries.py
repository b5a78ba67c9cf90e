"""Log probabilities as results and events give them: each with its token's text."""

from __future__ import annotations

from collections.abc import Callable

from llorch_worker.contract import TokenLogprob, TokenLogprobs
from llorch_worker.engine.prompt_logprobs import PromptLogprobs
from llorch_worker.engine.sampling.sampler import RowLogprobs


class LogprobEntries:
    """Makes the entries of a model's tokens. Any thread may call it."""

    def __init__(self, token_text: Callable[[int], tuple[str, tuple[int, ...] | None]]) -> None:
        """``token_text``: see :meth:`.Tokenizer.text_and_bytes`."""
        self._token_text = token_text

    def of_token(self, token_id: int, row: RowLogprobs) -> TokenLogprobs:
        """The entry of a token that was chosen in ``row``."""
        top = tuple(map(self._entry, row.top_ids, row.top))
        return TokenLogprobs(**dict(self._entry(token_id, row.chosen)), top=top)

    def of_prompt(self, scored: PromptLogprobs) -> tuple[TokenLogprobs | None, ...]:
        """One entry for each token of a prompt; None for the first."""
        return (
            None,
            *(
                self.of_token(token_id, RowLogprobs(chosen, top_ids, top))
                for token_id, chosen, top_ids, top in scored.rows()
            ),
        )

    def _entry(self, token_id: int, logprob: float) -> TokenLogprob:
        text, data = self._token_text(token_id)
        return TokenLogprob(id=token_id, text=text, logprob=logprob, bytes=data)
