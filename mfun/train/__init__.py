"""Training: what a step is made of, the loop around it, and what a run leaves in its folder."""
