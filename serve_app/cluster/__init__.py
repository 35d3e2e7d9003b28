"""Several replicas as one service: which takes a request, how many there are, handoffs between them, new weights."""
