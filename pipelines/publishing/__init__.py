"""Checkpoints in the layouts that engines load."""
