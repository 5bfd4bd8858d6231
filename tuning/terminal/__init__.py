"""What the tuner prints for people: tables, progress bars, and what a run did."""
