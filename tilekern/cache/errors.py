"""Errors of the cache; every message is one line that says what is wrong, then what to do."""


class CacheError(Exception):
    """Base class of all errors of the cache."""


class Missing(CacheError):  # noqa: N818 (the name says the state)
    """The requested record or blob is not there."""


class MissingRecord(Missing):
    """The record itself is not there."""


class Corrupt(CacheError):  # noqa: N818
    """A record, blob or pack is there, but its contents are wrong."""


class UnknownSchema(CacheError):  # noqa: N818
    """A record or pack was written by another version of tilekern, with a schema unknown to this one."""


class Untrusted(CacheError):  # noqa: N818
    """A record is whole but may not be loaded: no trust root signed it, or others can change it."""


class NoHome(Missing):
    """A folder below the user's home is needed, but the user has no home."""


class NoSecret(CacheError):  # noqa: N818
    """There is no secret for seals, and none can be written."""
