"""Compile in disposable processes that are forked with the front end loaded; jobs and the tuner use them."""
