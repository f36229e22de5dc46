"""The command line: data to stdout, words to stderr, exit codes in `taskdb.cli.exits`."""
