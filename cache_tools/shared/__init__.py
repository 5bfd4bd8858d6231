"""Code of several commands: their options, what they list and choose, and how they print it."""
