"""Many requests at once: who waits, who joins, and how much of a prompt a step takes."""
