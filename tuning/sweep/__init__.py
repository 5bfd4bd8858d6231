"""The sweep folder: plan, candidates, journals, seals, lock."""
