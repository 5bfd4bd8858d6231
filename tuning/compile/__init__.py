"""The compile stage: compile every distinct artifact of a sweep, in disposable processes on all cores."""
