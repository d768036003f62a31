"""The bytes: target cache, codecs, sample order, checkpoints. Knows nothing of drafters, Ray or DeepSpeed."""
