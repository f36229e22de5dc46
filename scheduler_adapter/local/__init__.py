"""Daemon, scheduler and workers as processes of their own on this machine: for the demo, the self-test, measurements and tests."""
