"""Large graphs are unpickled, optimised, ordered, pickled and streamed to the database in a process of their own."""
