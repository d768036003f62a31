"""Figures out of recorded rounds: the round log, and everything that a report or a comparison counts from it."""
