"""Check whether a candidate is right: inputs of many kinds, guard bands, and the comparison with the reference."""
