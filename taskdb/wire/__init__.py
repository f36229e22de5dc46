"""The wire: generated messages, their conversion to and from `taskdb.commands`, and the status table."""
