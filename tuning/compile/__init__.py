"""The compile stage: every distinct artifact of a sweep, in disposable processes over all cores."""
