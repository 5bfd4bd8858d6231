"""Generation without torch: the engine, and the checkpoints that it reads."""
