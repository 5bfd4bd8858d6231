"""Which problems a step asks for, found by running it on meta tensors."""
