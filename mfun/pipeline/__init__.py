"""Layer 5: pipeline stages, the executor of op streams, and the mailbox world."""
