"""The engine of checkmate: the integer program, its relaxation, and the way back to schedules."""
