"""A small cluster of real processes, and a job to watch on it."""
