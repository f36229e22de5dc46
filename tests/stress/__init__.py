"""Seeded random load on a real cluster, checked against an independent model. See `python -m tests.stress --help`."""
