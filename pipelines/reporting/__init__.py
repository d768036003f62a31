"""From decoding events to a report: every figure is derived from one event log."""
