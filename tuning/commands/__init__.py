"""The commands of ``python -m tilekern.tune``, one file each, with a click command named ``command``."""
