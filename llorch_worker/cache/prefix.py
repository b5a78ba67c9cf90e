"""The contents of blocks as a tree: texts that begin alike share a path."""

from __future__ import annotations


class Prefix:
    """A node of the tree: the beginning of a text, up to the end of a full block.

    The path from the root spells all its token ids. Blocks are compared id by id, so texts share a
    node only if they begin alike; a hash alone decides nothing.
    """

    __slots__ = ("__weakref__", "children", "copies", "depth", "parent", "tenants", "token_ids")

    def __init__(self, parent: Prefix | None = None, token_ids: tuple[int, ...] = ()) -> None:
        """``token_ids`` are those of the last block. The root has neither ids nor a parent."""
        self.parent = parent
        self.token_ids = token_ids
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Blocks from the root to here."""
        self.children: dict[tuple[int, ...], Prefix] = {}
        self.copies: list[int] = []
        """Blocks with the keys and values of ``token_ids`` after all that come before."""

        self.tenants: set[str | None] = set()
        """Those whose sequences have held such a block."""

    @property
    def known(self) -> bool:
        """Whether the tree still has it. A forgotten prefix never returns as the same object."""
        return self.parent is None or bool(self.copies)

    def nearest_known(self) -> Prefix:
        """This prefix, or its nearest ancestor that the tree still has."""
        prefix = self
        while prefix.parent is not None and not prefix.copies:
            prefix = prefix.parent
        return prefix

    def path(self, depth: int) -> list[Prefix]:
        """The prefixes deeper than ``depth`` on the path to this one, which is the last."""
        nodes: list[Prefix] = []
        prefix: Prefix | None = self
        while prefix is not None and prefix.depth > depth:
            nodes.append(prefix)
            prefix = prefix.parent
        nodes.reverse()
        return nodes
