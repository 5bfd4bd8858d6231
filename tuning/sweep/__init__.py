"""The sweep folder: the plan, the journals of what was done, whose lines they are, who holds them; candidates."""
