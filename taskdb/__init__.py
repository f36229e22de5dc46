"""dask-taskdb: the task state of Dask's scheduler, held outside the scheduler. Knows nothing of Dask itself."""

__version__ = "0.1.0"
