"""From the bytes of a request and of its reply to what the referee judges, for every vendor and for this service."""
