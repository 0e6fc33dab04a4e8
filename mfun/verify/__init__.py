"""Proof by comparison: a layout run on this machine against the independent reference."""
