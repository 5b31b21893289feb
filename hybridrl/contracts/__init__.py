"""Types for the stages of a step's data. Instances are frozen and check their values."""
