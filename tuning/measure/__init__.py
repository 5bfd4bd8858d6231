"""The measure stage: tasks, the disposable processes that work on them, and GPU time."""
