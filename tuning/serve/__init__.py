"""The tuning service: watches the wanted lists of caches, and tunes what costs running jobs most."""
