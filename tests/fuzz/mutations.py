"""Valid bytes and messages made wrong, by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

#: Numbers at which something may end.
_EDGES = (0, 1, 2, 7, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "\x00", "é" * 40, "x" * 200, "../..", "'; --", "￿")


def mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to four changes of some bytes. `others` are sources of what is put in."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(changed))
        match random.randrange(8):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << random.randrange(8)
            case 1 if changed:
                changed[min(at, len(changed) - 1)] = random.choice((0, 1, 127, 128, 255))
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + random.randint(1, 8)]
            case 4:
                changed[at:at] = random.randbytes(random.randint(1, 16))
            case 5:
                changed[at : at + 8] = random.choice(_EDGES).to_bytes(8, random.choice(("big", "little")))
            case 6 if others:
                other = random.choice(others)
                changed[at:] = other[random.randint(0, len(other)) :]
            case _:
                changed += changed[at:]
    return bytes(changed[: 1 << 16])


def disturb(random: Random, message: Any) -> None:
    """Change some fields of a message, in place, so that it is still one."""
    for _ in range(random.randint(1, 3)):
        _disturb(random, message)


def _disturb(random: Random, message: Any) -> None:
    fields = message.DESCRIPTOR.fields
    present = [field for field, _ in message.ListFields()]
    field = random.choice(present if present and random.random() < 0.8 else fields)
    if field.is_repeated:
        _disturb_list(random, field, getattr(message, field.name))
    elif field.type == field.TYPE_MESSAGE:
        _disturb(random, getattr(message, field.name)) if field.message_type.fields else getattr(message, field.name).SetInParent()
    elif random.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(random, field, getattr(message, field.name)))


def _disturb_list(random: Random, field: Any, values: Any) -> None:
    many = list(values)
    if field.type == field.TYPE_MESSAGE:
        if not many or random.random() < 0.2:
            values.add()
        elif random.random() < 0.2:
            del values[random.randrange(len(many))]
        elif field.message_type.fields:
            _disturb(random, random.choice(many))
        return
    at = random.randint(0, len(many))
    match random.randrange(5):
        case 0:
            del many[at:]
        case 1:
            many.insert(at, _value(random, field, many[0] if many else None))
        case 2:
            many *= 2
        case 3:
            random.shuffle(many)
        case _ if many:
            at = min(at, len(many) - 1)
            many[at] = _value(random, field, many[at])
    del values[:]
    values.extend(many)


def _value(random: Random, field: Any, before: Any) -> Any:
    match field.cpp_type:
        case field.CPPTYPE_STRING if field.type == field.TYPE_BYTES:
            return mutate(random, before or b"", [b"\x81\xa1x\x01", b"\xa1x"])
        case field.CPPTYPE_STRING:
            return random.choice((*_TEXTS, before or "", (before or "") + "x"))
        case field.CPPTYPE_DOUBLE | field.CPPTYPE_FLOAT:
            return random.choice(_FLOATS)
        case field.CPPTYPE_BOOL:
            return not before
    bits = 64 if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else 32
    number = random.choice((*_EDGES, (before or 0) + 1, abs((before or 0) - 1))) % 2**bits
    signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64, field.CPPTYPE_ENUM)
    return number - 2**bits if signed and number >= 2 ** (bits - 1) else number
