"""What a loss scale is: frozen configurations, their states of arrays, and statistics."""
