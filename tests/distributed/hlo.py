"""Counting the collectives of compiled programs."""

import re
from collections import Counter

SCALAR = ("all-reduce", "f32[]")


def collectives(text):
    """(opcode, type of an operand) of each collective in a program. One of many arrays counts them all."""
    opcodes = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    found = re.findall(rf"= (.*?) ({opcodes})(?:-start)?\(", text)
    return Counter((opcode, operand) for types, opcode in found for operand in re.findall(r"\w+\[[\d,]*\]", types))


def loops(text):
    """The text of everything that runs inside the loops of a program."""
    blocks = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) .*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    names = set(re.findall(r"body=%?([\w.-]+)", text))
    assert names <= blocks.keys()
    while more := {n for name in names for n in re.findall(r"%([\w.-]+)", blocks[name]) if n in blocks} - names:
        names |= more
    return "".join(blocks[name] for name in names)
