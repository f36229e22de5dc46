"""The daemon: one asyncio loop whose thread is also the only writer of the store."""
