"""Where training ends, in 16 bit and in float32."""
