"""The stages of a step's data: frozen types that check their values."""
