"""Autocast: rules (data), plan (decisions), interpreter (evaluation), report."""

from .report import autocast_report as autocast_report
from .transform import autocast as autocast, full_precision as full_precision
