"""Whether a candidate is right: inputs of many kinds, guard bands, and how results are judged beside the reference."""
