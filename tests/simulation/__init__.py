"""The whole system on one thread, in virtual time, from one seed. `python -m tests.simulation --seed N` runs it.

Real: the engine, writer, service and memory store of the daemon; `taskdb.client.Session`; the adapter on a real `distributed.Scheduler`;
the state machine and the preload of workers. Simulated: time (`loop.py`), the streams between processes (`network.py`, `rpc.py`), the disk
(`daemon.py`), and the deaths of processes (`faults.py`).
"""
