"""The decisions of autocast: its rules, and the passes `cast` and `quantize`."""
