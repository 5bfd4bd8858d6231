"""The commands of ``python -m cache_tools``: their options, and the work of each."""
