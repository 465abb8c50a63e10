"""Loss scales: frozen configurations, their states of arrays, and statistics."""
