"""Looking after a cache from the command line: list, show, verify, clear, pack, unpack."""
