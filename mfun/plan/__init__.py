"""What a layout costs, worked out before anything runs."""
