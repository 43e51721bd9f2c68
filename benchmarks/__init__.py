"""What accumulation costs: time, memory, communication and precision, beside the alternatives."""
