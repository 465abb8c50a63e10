"""Autocast in passes: cast, quantize, recompute, each from a closed jaxpr to a closed jaxpr."""

from .formats import Float8 as Float8, Int8 as Int8
from .memory import memory_report as memory_report, recompute as recompute
from .report import autocast_report as autocast_report
from .transform import autocast as autocast, full_precision as full_precision
