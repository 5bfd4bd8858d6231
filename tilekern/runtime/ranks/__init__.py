"""Ranks of one job run the same kernels: what each holds is compared, and the records of one of them are taken over."""
