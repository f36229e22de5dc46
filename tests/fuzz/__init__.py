"""Bytes that nobody meant: messages to the daemon, records of its store, bytes of its file. Everything follows from a seed.

Longer, or other ones: `TASKDB_FUZZ_ROUNDS=50 TASKDB_FUZZ_SEED=7 python -m pytest tests/fuzz --timeout 0`.
"""
