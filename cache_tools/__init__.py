"""Looking after a cache from the command line: list, show, compare, explain, verify, clear, prune, pack, unpack."""
