"""What blocks hold, as a tree: equal beginnings of texts are equal paths."""

from __future__ import annotations


class Prefix:
    """The beginning of a text, up to the end of a full block: a node of the tree.

    Its path from the root spells all its token ids, each block compared id by id. So two texts
    have a node in common only where they begin alike; a hash alone decides nothing.
    """

    __slots__ = ("children", "copies", "depth", "parent", "token_ids")

    def __init__(self, parent: Prefix | None = None, token_ids: tuple[int, ...] = ()) -> None:
        """``token_ids``: those of the last block. Without a parent it is the root, of no text."""
        self.parent = parent
        self.token_ids = token_ids
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Blocks from the root to here."""
        self.children: dict[tuple[int, ...], Prefix] = {}
        self.copies: list[int] = []
        """Blocks with keys and values of ``token_ids``, computed after those of the parents."""

    @property
    def known(self) -> bool:
        """Whether the tree still has it. One that was forgotten never comes back as this object."""
        return self.parent is None or bool(self.copies)

    def nearest_known(self) -> Prefix:
        """It, or the nearest of its parents that the tree still has."""
        prefix = self
        while prefix.parent is not None and not prefix.copies:
            prefix = prefix.parent
        return prefix

    def path(self, depth: int) -> list[Prefix]:
        """The prefixes below ``depth`` on the way to this one, which is the last."""
        nodes: list[Prefix] = []
        prefix: Prefix | None = self
        while prefix is not None and prefix.depth > depth:
            nodes.append(prefix)
            prefix = prefix.parent
        nodes.reverse()
        return nodes
