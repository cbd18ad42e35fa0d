"""The base of all messages between processes, and their encoding as msgpack."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A message. Encoded as a list of the class's name and its fields, in order."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The wire form of a message."""
    return _encoder.encode(message)
