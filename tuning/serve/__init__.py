"""The service: tunes what running jobs have asked for and did not find, and publishes it into their caches."""
