"""What flows through a step, as frozen types that check what enters them."""
