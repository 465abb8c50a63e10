"""Formats of products whose operands have fewer than 16 bits. A file for each family."""

from .blocks import MXFP8 as MXFP8
from .protocol import Format as Format
from .scaled import Float8 as Float8, Int8 as Int8
