"""The tuner's output for people: tables, progress bars, and what a run did."""
