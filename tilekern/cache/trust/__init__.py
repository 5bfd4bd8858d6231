"""The rules of what may be loaded: who made it, and who could have changed it."""
