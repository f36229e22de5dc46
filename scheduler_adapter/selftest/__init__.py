"""`taskdb selftest`: real processes that are killed in mid-work, and a count of everything that must not come of it."""
