"""Names of keys and channels in a Redis Cluster: all of a fleet begin with one hash tag.

A Cluster places a key by the part in braces, so the keys of a fleet lie in one slot and on one
master, as every script and every command with several keys needs. The names are changed where a
connection sends commands and reads replies. All other code knows them without the tag, the scripts
too: see ``lua/parts/tagged_names.lua``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from redis.crc import key_slot


def key_prefix(tag: str) -> str:
    """What all names begin with. Celery adds a ``_`` to a prefix without a colon, kombu does not;
    with it, ``global_keyprefix`` of a stock producer means the same in both."""
    return f"{{{tag}}}:"


def slot_of(tag: str) -> int:
    """The slot that all keys of the fleet lie in."""
    return int(key_slot(key_prefix(tag).encode()))


_COMMANDS = {
    "ACL AUTH CLUSTER CONFIG DISCARD ECHO EXEC HELLO INFO MULTI PING QUIT SCRIPT SELECT TIME "
    "UNWATCH": slice(0, 0),
    "EXPIRE GET HDEL HEXISTS HGET HGETALL HINCRBY HKEYS HLEN HMGET HSET HSETNX INCR LINDEX LLEN "
    "LPOP LPUSH LRANGE LREM LTRIM PERSIST PEXPIRE PTTL PUBLISH RPOP RPUSH SADD SCARD SET SETEX "
    "SMEMBERS SREM TTL TYPE XADD XLEN XRANGE XREVRANGE ZADD ZCARD ZCOUNT ZINCRBY ZRANGE "
    "ZRANGEBYSCORE ZREM ZREMRANGEBYRANK ZREMRANGEBYSCORE ZREVRANGE ZSCORE": slice(0, 1),
    "DEL EXISTS MGET PSUBSCRIBE PUNSUBSCRIBE RPOPLPUSH SUBSCRIBE UNLINK UNSUBSCRIBE WATCH": (
        slice(0, None)
    ),
    "BLPOP BRPOP": slice(0, -1),
}
"""Commands -> which of their arguments are names. Only what this package, kombu and Celery send."""
_NAMES = {command: names for group, names in _COMMANDS.items() for command in group.split()}
_SUBSCRIBES = ("SUBSCRIBE", "PSUBSCRIBE")
_REPLIES_NAME = ("BRPOP", "SCAN", "XREAD", *_SUBSCRIBES)
"""The commands whose replies hold names. So do those of BLPOP, which a worker sends in one packet
with a script; there it reads only the value."""
_REDIS_OWN = "__redis__:"
"""Begins the channels that Redis itself publishes in."""


class TaggedNames:
    """Adds the prefix to the names in commands, and takes it off those in replies.

    One object belongs to one connection, because a reply does not tell its command.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._prefix_bytes = prefix.encode()
        self._asked = ""
        """The last command; a subscribed connection stays so."""

    def connected(self) -> None:
        """Notes a new connection, which is not subscribed."""
        self._asked = ""

    def sent(self, command: str) -> None:
        """Notes a command that was sent alone, or with "" several."""
        if self._asked not in _SUBSCRIBES:
            self._asked = _name(command)

    def tagged(self, command: Sequence[Any]) -> list[Any]:
        """The command with tagged names; raises NotImplementedError if it is unknown, or a SCAN of
        all keys."""
        name, arguments = _name(command[0]), list(command[1:])
        match name:
            case "EVAL" | "EVALSHA":
                names = slice(2, 2 + int(arguments[1]))
            case "XREAD":
                (before,) = _places("STREAMS", arguments)
                names = slice(before + 1, before + 1 + (len(arguments) - before) // 2)
            case "SCAN":
                places = _places("MATCH", arguments)
                if not places:
                    raise NotImplementedError("SCAN without MATCH would find the keys of others")
                names = slice(places[0] + 1, places[0] + 2)
            case "CLIENT":
                # Of key tracking: what the names of those keys begin with.
                for before in _places("PREFIX", arguments):
                    arguments[before + 1] = self._add(arguments[before + 1])
                names = slice(0, 0)
            case _ if name in _NAMES:
                names = _NAMES[name]
            case _:
                raise NotImplementedError(f"which arguments of {name} are keys?")
        arguments[names] = map(self._add, arguments[names])
        return [command[0], *arguments]

    def all_tagged(self, commands: Iterable[Sequence[Any]]) -> list[list[Any]]:
        """The commands of a pipeline with tagged names.

        Raises NotImplementedError also for one whose reply would hold names: a reply in a pipeline
        does not tell its command.
        """
        tagged = []
        for command in commands:
            if _name(command[0]) in _REPLIES_NAME:
                raise NotImplementedError(f"{_name(command[0])} in a pipeline: send it alone")
            tagged.append(self.tagged(command))
        return tagged

    def bare(self, reply: Any) -> Any:
        """A reply without the prefix, to the last command or of the subscription."""
        if not isinstance(reply, list):
            return reply
        match self._asked:
            case "BLPOP" | "BRPOP":
                return [self._remove(reply[0]), *reply[1:]]
            case "XREAD":
                return [[self._remove(stream), entries] for stream, entries in reply]
            case "SCAN":
                return [reply[0], [*map(self._remove, reply[1])]]
            case "SUBSCRIBE" | "PSUBSCRIBE":
                # Its kind, the pattern if there is one, the channel, the message; or a PONG.
                kind, *channels, message = reply
                if isinstance(message, list):
                    # Of key tracking: the keys that have changed.
                    message = [*map(self._remove, message)]
                return [kind, *map(self._remove, channels), message]
        return reply

    def _add(self, name: Any) -> Any:
        if isinstance(name, bytes):
            return self._prefix_bytes + name
        return name if str(name).startswith(_REDIS_OWN) else f"{self._prefix}{name}"

    def _remove(self, name: Any) -> Any:
        if isinstance(name, bytes):
            return name.removeprefix(self._prefix_bytes)
        return name.removeprefix(self._prefix) if isinstance(name, str) else name


def _name(command: str) -> str:
    return command.partition(" ")[0].upper()


def _places(word: str, arguments: Sequence[Any]) -> list[int]:
    """Where ``word`` is; redis-py has some words as bytes."""
    words = (word, word.encode())
    return [place for place, argument in enumerate(arguments) if argument in words]
