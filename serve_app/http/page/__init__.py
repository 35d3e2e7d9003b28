"""The status page: what it shows, how it gets there, and the page itself in `static`."""
