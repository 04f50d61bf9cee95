"""The policy of lockkit, written once: acquisition, renewal, deadlines, loss and the life of a client."""
