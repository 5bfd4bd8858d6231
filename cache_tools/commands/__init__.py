"""The commands of ``python -m tilekern.cache_tools``, one file each, with a click command of the file's name."""
