"""Reading a target, and lossless speculative decoding with it."""
