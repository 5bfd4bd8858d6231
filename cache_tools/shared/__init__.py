"""What several commands use: their options, what they list and choose, and how they print it."""
