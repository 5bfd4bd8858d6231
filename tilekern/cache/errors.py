"""Errors of a cache; every message is one line that names the wrong thing and what would be right."""


class CacheError(Exception):
    """Base of all errors of the cache."""


class Missing(CacheError):  # noqa: N818 (the name says the state)
    """The record or blob that was asked for is not there."""


class MissingRecord(Missing):
    """The record itself is not there."""


class Corrupt(CacheError):  # noqa: N818
    """A record, blob or pack is there, and its contents are wrong."""


class UnknownSchema(CacheError):  # noqa: N818
    """A record or pack was written by a version of tilekern whose schema this one does not know."""


class Untrusted(CacheError):  # noqa: N818
    """A record is there and whole, and may not be loaded: nobody who is trusted signed it, or others can change it."""


class NoHome(Missing):
    """A folder below the user's home was asked for, and the user has none."""


class NoSecret(CacheError):  # noqa: N818
    """There is no secret to seal with, and none can be written."""
