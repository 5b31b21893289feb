"""What a run takes and how long, before it starts: layouts, memory, time and the choice of them."""
