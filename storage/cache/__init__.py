"""A target cache: its plan, shards, records, readers, and the tools that check, repair and rewrite it."""
