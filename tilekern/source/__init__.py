"""The digests of a kernel's source, and what they are made of: read, and never imported."""
