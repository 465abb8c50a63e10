"""Autocast in passes: cast, quantize, recompute, each from a closed jaxpr to a closed jaxpr."""

from .float8 import Float8 as Float8
from .report import autocast_report as autocast_report
from .transform import autocast as autocast, full_precision as full_precision
